"""Jobs, from the options to the outcome; those with a fixed set of ranks are run here.

request (what to run) -> run_job (any job, elastic ones too) -> static_job, with worker_specs and
cause. controllers hands a job over to mpirun (mpi_launch) or jsrun (jsrun_launch); dry_run says
what would be started. `horovod.runner.launch` and `horovod.runner.functions` use it.
"""
