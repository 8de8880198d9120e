"""The optimizers that `hvd.DistributedOptimizer` makes, and what each of them is built from."""
