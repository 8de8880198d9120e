"""Distributed training with one small API: ``import horovod.torch as hvd`` in a script."""

__version__ = "0.29.0"
