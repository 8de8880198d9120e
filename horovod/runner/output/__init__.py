"""What people see of a job: lines of workers, messages, progress, and what went wrong.

Both kinds of job write through it. `watcher` is the seam for others who want to know.
"""
