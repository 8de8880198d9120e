"""A simulated cluster that runs the shipped code: hosts, links, processes and faults from one seed.

    python -m tests.simulation --seeds 0-999      # jobs with these seeds, several at once
    python -m tests.simulation --seeds 17 --story # one of them, with everything that happened

`world` has the virtual clock and decides which thread runs next; `network` has links and sockets;
`connections` and `threads` are what Python's modules for these become inside the simulation;
`processes` has hosts and processes, `system` and `pipes` have what these ask of a system, `ssh` is
the way to other hosts, and `disk` forgets what was not synced. `modules` loads Horovod with those
in place of Python's own, so the code under test is the one that ships, unchanged. `plan` draws an
elastic job with faults from a seed, `driver`, `programs` and `worker` are its programs, and `job`
runs it and checks what docs/reliability.md promises; `deadlines` checks promises about time, and
`hand_over` has a fault that waits for its moment. `fixed_plan`, `fixed_driver`, `fixed_worker` and
`fixed_job` do that for jobs with fixed ranks. `coverage` counts what was tried; `mutants` and
`fixed_mutants` have mistakes that it must find.
"""
