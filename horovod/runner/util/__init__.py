"""Names of Horovod 0.28.1: threads, streams, addresses of this host. See docs/old_names.md."""
