"""Elastic training: the workers' side, with a driver that does what each test tells it."""
