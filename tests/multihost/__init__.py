"""What crosses hosts, on several hosts inside one machine (`tests.hosts`)."""
