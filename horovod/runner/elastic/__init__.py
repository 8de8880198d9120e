"""Elastic jobs: ``horovodrun`` with --min-np or --host-discovery-script.

`run_job` gives the job controller a `driver`. The driver executes what `policy` decides; `policy`
and `termination` (the rules for the end of a job) are pure functions of `job_state`, which is
everything that the driver knows. `mailbox` takes messages of other threads into that state, and
`discovery` finds hosts. `liveness` publishes decisions, checks that workers answer them, and
records losses. The workers' side is `horovod.common.generations.membership`;
`horovod.common.generations.decisions` has what both sides write to the store.
"""
