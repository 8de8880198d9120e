"""Run jobs, from the options to the outcome; jobs with a fixed set of ranks are run here.

`request` describes what to run; `run_job` runs any job, elastic ones too, and `fixed_ranks` is the
policy of those with fixed ranks. `controllers` hands a job over to mpirun or jsrun (`mpi_launch`);
`join` brings this machine into a job; `host_check` (with `check_report`) says whether a job could
run. `horovod.runner.launch` and `horovod.runner.functions` use these modules.
"""
