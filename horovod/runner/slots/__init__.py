"""Which rank runs where: host lists, the plan of slots, and the variables that tell a worker.

Pure functions that every other folder of the launcher may use.
"""
