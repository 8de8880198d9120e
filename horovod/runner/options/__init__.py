"""The options of a job: the command line, the configuration file, and the values that they mean.

`horovod.runner.launch` parses with `arguments`; `horovod.run` and the functions of Horovod 0.28.1
make their options with it, too.
"""
