"""``horovod.run``: call a function on all ranks of a job, and bring back results and errors.

`run_function` is the caller's side, `run_task` the worker's, and `function_call` what travels
between them; `horovod.spark` and `horovod.ray` use the same parts.
"""
