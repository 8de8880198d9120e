"""Decide on which host each rank runs: host lists, the plan of slots, and the workers' variables.

These are pure functions that every other folder of the launcher may use.
"""
