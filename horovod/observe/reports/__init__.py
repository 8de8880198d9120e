"""Report which ranks are slow and why, what to try first, and how a job scales: pure functions.

- `slow_ranks` says which ranks are slow, and not only by chance;
- `analysis` splits the steps of a timeline (`splitting`) and finds late ranks;
- `losses` sets long steps apart, and says what the others lose to which cause;
- `advice` and `rank_advice` say what to try;
- `text` and `page` show all of it; `command` is ``python -m horovod.timeline``;
- `scaling` reports a scaling study.
"""
