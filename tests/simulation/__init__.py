"""A simulated cluster that runs the shipped code: hosts, links, processes and faults from one seed.

    python -m tests.simulation --seeds 0-999      # jobs with these seeds, several at once
    python -m tests.simulation --seeds 17 --story # one of them, with everything that happened

`world` has the virtual clock and decides which thread runs next; `network` and `threads` are what
Python's modules of these names become inside the simulation; `processes` loads Horovod's modules
anew for every simulated process, with those in place of Python's own. So the code under test is the
one that ships, unchanged: it imports `time`, `threading`, `socket`, `selectors`, `signal`, `os` and
`secrets`, and gets simulated ones. `job` makes a job with faults from a seed and checks what
docs/reliability.md promises; `mutants` has mistakes that it must find.
"""
