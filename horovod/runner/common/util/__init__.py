"""Names of Horovod 0.28.1 that programs which start jobs import. See docs/old_names.md."""
