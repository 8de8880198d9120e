"""Between hosts: collectives over TCP connections."""
