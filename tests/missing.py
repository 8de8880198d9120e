"""Tests that this machine cannot run: one line at the end of a run, with what to install.

`tests/conftest.py` calls `summarise`. The tests of several hosts skip themselves with reasons that
begin in a certain way; listing each would bury what else was skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

SSH = "hosts to log in to need the program"
HOSTS = "several hosts on one machine need"
SLURM = "a Slurm on one machine needs the program"

_ADVICE = {
    SSH: "apt-get install openssh-server openssh-client",
    f"{HOSTS} the program ip": "apt-get install iproute2",
    f"{HOSTS} root": "run them as root",
    SLURM: "apt-get install slurm-wlm munge",
}

CATEGORY = "not possible here"


def summarise(stats: dict[str, list]) -> list[str]:
    """Take such skips out of pytest's own list; a line for each kind of them."""
    missing: Counter[str] = Counter()
    left = []
    for report in stats.get("skipped", ()):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        kind = next((start for start in _ADVICE if start in reason), None)
        if kind is None:
            left.append(report)
        else:
            missing[kind] += 1
            stats.setdefault(CATEGORY, []).append(report)
    if missing:
        stats["skipped"] = left
    return [_line(kind, count, _ADVICE) for kind, count in missing.items()]


def _line(kind: str, count: int, advice: Mapping[str, str]) -> str:
    what = {SSH: "sshd", SLURM: "Slurm"}.get(kind) or kind.removeprefix(HOSTS).strip()
    return f"{count} tests of several hosts did not run, for want of {what}: {advice[kind]}"
