"""The line of --progress, from the reports of simulated ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from horovod.common.store import MemoryStore
from horovod.observe.dashboard import status_line
from horovod.observe.dashboard.status_line import StatusLine, describe
from tests.observe.dashboard.simulated import SimulatedJob


def _write_reports(job: SimulatedJob, store: MemoryStore) -> None:
    for rank in range(job.size):
        store.set(job.key(rank), job.encoded(rank))


def test_the_line_says_step_and_rate_and_who_is_slow(monkeypatch: pytest.MonkeyPatch):
    store, job = MemoryStore(), SimulatedJob(4)
    # Reports are judged by their age, and a rank when that has lasted.
    monkeypatch.setattr(status_line, "time", SimpleNamespace(time=lambda: job.now))
    line = StatusLine(store, {}, elastic=False)
    assert line.variables() == {"HOROVOD_STATS_INTERVAL": "1"}
    line.note("decision", number=0, workers=job.places())
    assert line.status() == ""
    job.run(10)
    _write_reports(job, store)
    said = line.status()
    assert said.startswith("step 10, ")
    assert said.endswith(" steps/s, 4 ranks")
    job.slow = {2: 0.1}
    for _ in range(6):
        job.run(10)
        _write_reports(job, store)
        said = line.status()
    assert said.endswith("4 ranks; rank 2 is slow in backward")
    line.note("exited", worker="3", host="node00", code=0)
    assert ", 3 of 4 ranks" in line.status()


def test_an_interval_that_the_user_has_chosen_stays():
    line = StatusLine(MemoryStore(), {"HOROVOD_STATS_INTERVAL": "5"}, elastic=False)
    assert line.variables() == {"HOROVOD_STATS_INTERVAL": "5"}


@pytest.mark.parametrize(("since", "told"), [(98.0, ""), (90.0, "; 10 s waiting for rank 1-2")])
def test_long_waits_are_told(since: float, told: str):
    picture = {
        "now": 100.0,
        "job": {"step": 7, "rate": 12.345, "alive": 3, "size": 3},
        "ranks": [{"rank": 1, "reason": "awaited"}, {"rank": 0, "reason": ""}],
        "stalls": [{"since": since, "missing": [1, 2]}],
    }
    assert describe(picture) == f"step 7, 12.3 steps/s, 3 ranks{told}"
