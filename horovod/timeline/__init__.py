"""Reading timelines: merging the files of several ranks, and explaining them.

The engine records (`horovod.engine.timeline`). Here are pure functions over its recordings, and the
command ``python -m horovod.timeline``. Nothing here needs a framework or a running job:

- `files` reads a rank's file, `recording` makes collectives, waits and steps of its events;
- `clocks` puts the ranks on one clock;
- `merging` writes one trace for Perfetto and chrome://tracing;
- `analysis` splits steps (`splitting`), sets long ones apart (`long_steps`) and finds late ranks;
- `losses` says what a step loses to which cause, `advice` says what to try (`rank_advice`,
  `exchange_advice`; the kinds of advice are in `faults`);
- `text` and `page` (with `step_chart` and `styles`) show all of it.
"""
