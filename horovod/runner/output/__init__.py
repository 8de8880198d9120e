"""What people see of a job: the workers' lines, messages, progress, and the account of a failure.

Both kinds of job write through it. `watcher` is the interface for other parts that want to follow a
job, such as the dashboard.
"""
