"""Names that scripts import from where Horovod 0.28 had them: `util`, and `service`."""
