"""What a job is asked to be: the command line, the configuration file, and the values they mean.

`horovod.runner.launch` parses with `arguments`; `horovod.run` and upstream's functions make their
options with it too.
"""
