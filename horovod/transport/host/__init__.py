"""Inside one host: collectives through shared memory and the memory of other processes."""
