"""Count, record, explain and show what a job does.

- `statistics`: what a rank counts and times while it runs, behind `hvd.stats()`;
- `timeline`: recording a rank's operations into a file, reading such files and merging them;
- `reports`: who is slow and why, what to try first, as text and as a page; scaling studies;
- `dashboard`: the live page of a running job.

`statistics` and `timeline` are below the engine, which writes into them. `reports` needs neither
torch nor a running job. `dashboard` runs beside the launcher, and does not import torch either.
"""
