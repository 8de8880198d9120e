"""The live page of a job: which rank is slow and why, what a step is made of, what just happened.

``horovodrun --dashboard`` serves it from the launcher. Ranks write reports into the job's store
(`reports`), and `dashboard` gets the launcher's events. `board` makes one picture of both, with the
rules of `stragglers`; `server` serves it as a page (`page`) and for Prometheus (`prometheus`).
Launchers call `watching`; the rest is imported only in a job that has a page.
"""
