"""A simulated cluster that runs the shipped code: hosts, links, processes and faults from one seed.

    python -m tests.simulation --seeds 0-999      # jobs with these seeds, several at once
    python -m tests.simulation --seeds 17 --story # one of them, with everything that happened

`world` has the virtual clock and decides which thread runs next; `network` has links and sockets;
`connections` and `threads` are what Python's modules for these become inside the simulation;
`processes` has hosts, processes and the other system modules; `disk` forgets what was not synced.
`modules` loads Horovod with those in place of Python's own, so the code under test is the one that
ships, unchanged. `plan` draws a job with faults from a seed, `driver`, `agents` and `worker` are
its programs, and `job` runs it and checks what docs/reliability.md promises. `coverage` counts what
was tried; `mutants` has mistakes that it must find.
"""
