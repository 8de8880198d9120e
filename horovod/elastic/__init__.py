"""Elastic jobs, whose ranks come and go while training goes on. `worker` is the workers' side."""
