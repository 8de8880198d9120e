"""Record a timeline on each rank, read the files, and merge them.

- `recorder` writes a rank's file; `files` reads it, and has the names that both share;
- `recording` makes collectives, waits and steps of its events;
- `matching` finds what belongs together in the files of several ranks, `clocks` puts the ranks on
  one clock;
- `merging` writes one trace for Perfetto and chrome://tracing.
"""
