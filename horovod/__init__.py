"""Distributed training with one small API. Scripts use a binding: ``import horovod.torch as hvd``."""

__version__ = "0.29.0"
