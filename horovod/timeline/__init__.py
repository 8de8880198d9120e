"""Reading timelines: merging the files of several ranks, and explaining them.

The engine records (`horovod.engine.timeline`). Here are pure functions over what it recorded, and
the command ``python -m horovod.timeline``. Nothing here needs a framework or a running job:

- `files` reads a rank's file, `recording` makes collectives, waits and steps of its events;
- `clocks` puts the ranks on one clock;
- `merging` writes one trace for Perfetto and chrome://tracing;
- `analysis` splits steps and finds who is late, `advice` says what to try;
- `text` and `page` show both.
"""
