"""Names of Horovod 0.28.1 for its rendezvous over HTTP. See docs/old_names.md."""
