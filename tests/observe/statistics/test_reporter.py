"""Reports to the launcher's store, from real ranks of static and elastic jobs."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.store import MemoryStore, Store
from horovod.engine.runtime import runtime
from horovod.observe.statistics import reporter
from horovod.observe.statistics.process import Step
from horovod.observe.statistics.reporter import GpuUse, WaitingNotes, chosen_steps, report_key
from tests.elastic.job import ElasticJob
from tests.ranks import PATIENCE, RankPool, Ranks, listen, run_ranks, start_ranks, tell

OFTEN = {"HOROVOD_STATS_INTERVAL": "0.05"}

NUMBERS = {
    "steps": int,
    "step_seconds": float,
    "backward_seconds": float,
    "wait_seconds": float,
    "reduce_seconds": float,
    "hidden_seconds": float,
    "bytes_reduced": int,
    "bytes_shared_memory": int,
    "bytes_network": int,
    "bytes_device": int,
    "buckets": int,
    "operations": int,
    "negotiation_misses": int,
    "queue_length": int,
    "cpu_seconds": float,
    "memory_bytes": int,
    "gpu_memory_bytes": int,
    "last_step_seconds": float,
    "steps_per_second": float,
    "rank": int,
    "size": int,
    "local_rank": int,
    "cross_rank": int,
    "generation": int,
}


def check_report(text: bytes) -> dict[str, Any]:
    """A report that keeps to version 1."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    report: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert report["version"] == 1
    for key in ("rank", "size", "local_rank", "pid", "generation"):
        assert type(report[key]) is int, key
    assert type(report["host"]) is str
    assert abs(report["time"] - time.time()) < 600
    assert report["state"] in ("starting", "training", "waiting", "ended")
    assert report["cores"] == sorted(os.sched_getaffinity(0))
    assert 0 <= report["steps_before"] <= report["stats"]["steps"]
    stats = dict(report["stats"])
    assert stats.pop("host") == report["host"]
    assert {key: type(value) for key, value in stats.items()} == NUMBERS
    assert all(value >= 0 for value in stats.values())
    assert stats["hidden_seconds"] <= stats["wait_seconds"] + stats["reduce_seconds"] + 1e-9
    assert len(report["steps"]) <= 50
    for step in report["steps"]:
        assert len(step) == 7
        assert type(step[0]) is int
        assert abs(step[1] - report["time"]) < 600
        assert all(value >= 0 for value in step[2:])
    numbers = [step[0] for step in report["steps"]]
    assert numbers == sorted(set(numbers))
    waiting = report["waiting"]
    if waiting is not None:
        assert set(waiting) == {"since", "tensors", "missing_ranks", "source"}
        assert waiting["since"] <= report["time"]
        assert re.fullmatch(r".*\.py:\d+", waiting["source"])
    for values in report["metrics"].values():
        assert 0 < len(values) <= 200
        for step, value in values:
            assert type(step) is int
            assert value is None or type(value) is float
    return report


def store_of(ranks: Ranks) -> Store:
    return ranks._server.store


def await_report(
    ranks: Ranks, rank: int, wanted: Callable[[dict[str, Any]], bool], generation: int = 0
) -> dict[str, Any]:
    """The first report of the rank that is as wanted."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        text = store_of(ranks).try_get(report_key(generation, rank))
        found[:] = [] if text is None else [check_report(text)]
        return bool(found) and wanted(found[0])

    ranks._until(look, PATIENCE, f"a report of rank {rank}", ())
    return found[0]


def test_a_report_has_the_last_steps_and_the_longest():
    steps = [Step(n, 0.0, 5.0 if n == 3 else 0.1, 0.0, 0.0, 0.0, 0.0) for n in range(1, 201)]
    assert [step.number for step in chosen_steps(steps)] == [3, *range(152, 201)]
    assert chosen_steps(steps[150:]) == steps[150:]
    assert chosen_steps([]) == []


def be_patient() -> None:
    """Called in a rank: reports arrive, the last one too, however slow the machine is."""
    reporter._CONNECT_SECONDS = reporter._GOODBYE = PATIENCE


def training(rank: int, size: int) -> None:
    be_patient()
    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    tell("started")
    listen()
    for step in range(1, 8):
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hvd.stats.log(loss=loss, rank=rank)
        hvd.stats.log({"val/acc": math.nan}, step=10 * step)
    tell("trained")
    listen()


def test_a_static_job():
    with start_ranks(training, 2, env=OFTEN) as ranks:
        for rank in range(2):
            assert ranks.heard(rank) == "started"
            report = await_report(ranks, rank, lambda report: True)
            assert (report["rank"], report["size"], report["generation"]) == (rank, 2, 0)
            assert report["pid"] == ranks.pids[rank]
            assert report["steps"] == []
        ranks.say()
        for rank in range(2):
            assert ranks.heard(rank) == "trained"
            # Not the one of a rank that waited for long at the beginning of its last step.
            await_report(
                ranks,
                rank,
                lambda report: (report["stats"]["steps"], report["state"]) == (7, "training"),
            )
        ranks.say()
        assert all(outcome.exitcode == 0 for outcome in ranks.wait())
        for rank in range(2):
            report = check_report(store_of(ranks).get(report_key(0, rank), 0))
            assert report["state"] == "ended"
            assert report["stats"]["steps"] == 7


def test_steps_and_metrics_come_once():
    """With a long interval everything is in the last report."""
    with start_ranks(training, 2, env={"HOROVOD_STATS_INTERVAL": "3600"}) as ranks:
        for rank in range(2):
            await_report(ranks, rank, lambda report: True)  # the first comes at once
        ranks.say()
        ranks.say()
        ranks.results()
        for rank in range(2):
            report = check_report(store_of(ranks).get(report_key(0, rank), 0))
            assert [step[0] for step in report["steps"]] == list(range(1, 8))
            metrics = report["metrics"]
            assert [step for step, _ in metrics["loss"]] == list(range(1, 8))
            assert metrics["rank"] == [[step, float(rank)] for step in range(1, 8)]
            assert metrics["val/acc"] == [[10 * step, None] for step in range(1, 8)]
            seconds = sum(step[2] for step in report["steps"])
            assert seconds == pytest.approx(report["stats"]["step_seconds"])


def alone(rank: int, size: int) -> None:
    be_patient()
    hvd.init()
    hvd.allreduce(torch.ones(3))


def test_a_job_of_one_rank_reports_to_the_launcher_too():
    with start_ranks(alone, 1, env=OFTEN) as ranks:
        ranks.results()
        assert check_report(store_of(ranks).get(report_key(0, 0), 0))["stats"]["operations"] == 1


def test_no_reporter_unless_asked_for():
    def threads(rank: int, size: int) -> list[str]:
        import threading

        hvd.init()
        return [thread.name for thread in threading.enumerate()]

    for names in run_ranks(threads, 2):
        assert "horovod-stats" not in names
    for names in run_ranks(threads, 2, env=OFTEN):
        assert "horovod-stats" in names


def late(rank: int, size: int) -> None:
    be_patient()
    hvd.init()
    hvd.allreduce(torch.ones(1), name="first")
    tell("ready")
    if rank == 1:
        listen()
    hvd.allreduce(torch.ones(1), name="awaited")


def test_a_rank_that_waits_says_for_what_and_for_whom():
    with start_ranks(late, 3, env=OFTEN) as ranks:
        for rank in range(3):
            assert ranks.heard(rank) == "ready"
        # On a slow machine there may still be reports from the time of the first operation.
        wanted = {"tensors": ["allreduce.awaited"], "missing_ranks": [1]}
        for rank in (0, 2):
            report = await_report(
                ranks,
                rank,
                lambda report: wanted.items() <= (report["waiting"] or {}).items(),
            )
            assert report["state"] == "waiting"
            assert "test_reporter.py:" in report["waiting"]["source"]
        absent = await_report(ranks, 1, lambda report: report["state"] == "training")
        assert absent["waiting"] is None
        ranks.say()
        ranks.results()
        for rank in range(3):
            assert check_report(store_of(ranks).get(report_key(0, rank), 0))["waiting"] is None
        assert store_of(ranks).keys("stats-waiting/") == [], "notes are taken back"


def lonely(rank: int, size: int) -> str:
    hvd.init()
    tell("ready")
    listen()
    for _ in range(3):
        hvd.allreduce(torch.ones(1), name="goes on")
        time.sleep(0.1)
    hvd.shutdown()
    return "trained"


def test_a_store_that_is_gone_is_no_reason_to_fail():
    env = {**OFTEN, "HOROVOD_LOG_LEVEL": "debug"}
    with start_ranks(lonely, 2, env=env) as ranks:
        for rank in range(2):
            await_report(ranks, rank, lambda report: True)
            assert ranks.heard(rank) == "ready"
        ranks._server.close()
        for rank in range(2):
            ranks.wait_for_output(rank, "do not reach the launcher")
        ranks.say()
        assert ranks.results() == ["trained"] * 2
        for rank in range(2):
            assert ranks.output(rank).count("do not reach the launcher") == 1


def elastic(steps: int) -> list[dict[str, Any]]:
    be_patient()
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    seen: list[dict[str, Any]] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 2 * steps:
            if state.step == steps and hvd.size() == 3:
                seen.append(hvd.stats())
                tell("halfway")
                listen()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()
        seen.append(hvd.stats())

    train(state)
    return seen


def test_an_elastic_job_reports_each_generation_and_counts_on():
    with ElasticJob(elastic, 4, env=OFTEN) as job:
        job.start(3)
        for worker in range(3):
            assert job.heard(worker) == "halfway"
        report = await_report(job, 2, lambda report: report["stats"]["steps"] == 4, generation=1)
        assert (report["size"], report["generation"]) == (3, 1)
        job.kill(2)
        job.lose(2)
        job.say_to([0, 1])
        for outcome in job.wait(ranks=[0, 1]):
            assert outcome.error is None, outcome.describe()
            before, after = outcome.result
            assert (before["generation"], after["generation"]) == (1, job.number)
            assert (before["size"], after["size"]) == (3, 2)
            assert before["steps"] == 4
            assert after["steps"] == 8, "the numbers go on"
            assert after["operations"] > before["operations"]
        for rank in range(2):
            old = check_report(job.store.get(report_key(1, rank), 0))
            assert (old["state"], old["size"]) == ("ended", 3)
            new = check_report(job.store.get(report_key(job.number, rank), 0))
            assert (new["state"], new["size"], new["stats"]["steps"]) == ("ended", 2, 8)


def test_the_summary_comes_once_and_from_rank_0():
    def train(rank: int, size: int) -> None:
        hvd.init()
        model = torch.nn.Linear(4, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with start_ranks(train, 2, env={"HOROVOD_LOG_LEVEL": "info"}) as ranks:
        ranks.results()
        pattern = (
            r"3 steps in [\d.]+ s \([\d.e+]+ steps/s\): [\d.]+ % of the time waiting for other "
            r"ranks, [\d.]+ % reducing \([\d.]+ % hidden behind computing\), [\d.e-]+ MB reduced"
        )
        assert len(re.findall(pattern, ranks.output(0))) == 1, ranks.output(0)
        assert "% of the time" not in ranks.output(1)


def test_the_summary_of_an_elastic_job_comes_at_its_end_only():
    with ElasticJob(elastic, 4, env={"HOROVOD_LOG_LEVEL": "info"}) as job:
        job.start(3)
        for worker in range(3):
            assert job.heard(worker) == "halfway"
        job.kill(2)
        job.lose(2)
        job.say_to([0, 1])
        job.wait(ranks=[0, 1])
        assert job.output(0).count("% of the time") == 1
        assert "8 steps" in job.output(0)
        assert "% of the time" not in job.output(1)


class CountingStore(MemoryStore):
    requests = 0

    def set(self, key: str, value: bytes) -> None:
        self.requests += 1
        super().set(key, value)

    def keys(self, prefix: str) -> list[str]:
        self.requests += 1
        return super().keys(prefix)


def idle() -> int:
    store = CountingStore()
    notes = WaitingNotes(runtime._running())
    for _ in range(5):
        notes.look(store)
        assert notes.waiting(store) is None
    return store.requests


def test_nobody_asks_the_store_while_nothing_is_waited_for(pool2: RankPool):
    assert pool2.run(idle) == [0, 0]


# -- what NVIDIA's library tells of a GPU, where it is there ---------------------------------------


def library(asked: list[str]) -> ModuleType:
    module = ModuleType("a_pynvml")
    module.nvmlInit = lambda: asked.append("init")

    def handle(uuid: str) -> str:
        asked.append(uuid)
        if uuid == "GPU-lost":
            raise RuntimeError("GPU is lost")
        return uuid

    module.nvmlDeviceGetHandleByUUID = handle
    module.nvmlDeviceGetUtilizationRates = lambda device: SimpleNamespace(gpu=87, memory=3)
    module.nvmlDeviceGetMemoryInfo = lambda device: SimpleNamespace(total=2**34, used=5)
    return module


def test_numbers_of_the_rank_s_own_gpu(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "a_pynvml", library(asked))
    use = GpuUse("a_pynvml")
    assert use.look("") == {}
    assert asked == [], "a rank without a GPU asks nothing"
    for _ in range(2):
        assert use.look("GPU-1") == {"gpu_use": 0.87, "gpu_memory_total_bytes": 2**34}
    assert asked == ["init", "GPU-1"]


def test_without_the_library_or_the_gpu_there_is_nothing(monkeypatch: pytest.MonkeyPatch):
    assert GpuUse("no_such_module_at_all").look("GPU-1") == {}
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "a_pynvml", library(asked))
    use = GpuUse("a_pynvml")
    for _ in range(3):
        assert use.look("GPU-lost") == {}
    assert asked == ["init", "GPU-lost"], "and it is not asked again and again"
