"""Timelines of real jobs: what ranks record, and what merging and reporting make of it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from statistics import median

import pytest

from horovod.observe.reports.analysis import analyse
from horovod.observe.reports.command import main
from horovod.observe.timeline.clocks import align, compare, estimate
from horovod.observe.timeline.recording import Recording, read_recordings
from tests.hosts import Hosts, available
from tests.observe.timeline.trace_rules import check
from tests.ranks import run_ranks, start_ranks, tell

torch = pytest.importorskip("torch")

import horovod.torch as hvd  # noqa: E402

STEPS = 13  # the first is not recorded; of 12 chance makes a rank the last in all once in 4096
SLOW = 0.2  # seconds that rank 1 loses in each step, before its forward
SHIFT = 5000.0  # seconds that a wrong clock is ahead


def paths_in(folder: Path, size: int = 2) -> list[str]:
    names = ["run.json", *(f"run.rank{rank}.json" for rank in range(1, size))]
    return [str(folder / name) for name in names]


def train(rank: int, steps: int, late: str | None = None) -> None:
    """With a folder `late`, rank 1 loses time before each step, once all others are in backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    for number in range(steps):
        if late is not None and rank == 1:
            files = [Path(late, f"{number}.{other}") for other in range(hvd.size()) if other != 1]
            while not all(file.exists() for file in files):
                time.sleep(0.001)  # between looks at the file system
            time.sleep(SLOW)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32)).sum()
        if late is not None and rank != 1:
            Path(late, f"{number}.{rank}").touch()
        loss.backward()
        optimizer.step()


# -- one slow rank ---------------------------------------------------------------------------


def _slow_rank(rank: int, size: int, folder: str) -> None:
    hvd.init()
    train(rank, STEPS, folder)
    hvd.grouped_allreduce([torch.ones(3), torch.ones(5)], name="mine")
    handle = hvd.allreduce_async(torch.ones(7), name="later")
    hvd.synchronize(handle)
    hvd.shutdown()


@pytest.fixture(scope="module")
def slow_job(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[str], list[Recording]]:
    folder = tmp_path_factory.mktemp("slow")
    buckets = {"HOROVOD_OVERLAP_BACKWARD": "1", "HOROVOD_FUSION_THRESHOLD": "20000"}
    env = {"HOROVOD_TIMELINE": f"{folder}/run.json", **buckets}
    run_ranks(_slow_rank, 2, str(tmp_path_factory.mktemp("late")), env=env)
    paths = paths_in(folder)
    return paths, read_recordings(paths)


def test_rows_are_named_after_buckets_and_know_their_tensors(slow_job):
    _, (first, second) = slow_job
    buckets = {
        name: tensors for name, tensors in first.tensors.items() if "DistributedOptimizer" in name
    }
    assert first.tensors == second.tensors
    count = len(buckets)
    assert count > 1
    assert sorted(each for tensors in buckets.values() for each in tensors) == sorted(
        f"{layer}.{kind}" for layer in (0, 2, 3) for kind in ("weight", "bias")
    )
    for number, (name, tensors) in enumerate(buckets.items(), 1):
        span = tensors[0] if len(tensors) == 1 else f"{tensors[0]} to {tensors[-1]}"
        assert name == f"allreduce.DistributedOptimizer.0.bucket {number} of {count} ({span})"
    sizes = {"0.weight": 64 * 32, "0.bias": 64, "2.weight": 64 * 64, "2.bias": 64}
    sizes |= {"3.weight": 4 * 64, "3.bias": 4}
    for each in first.collectives:
        if each.name in buckets:
            expected = 4 * sum(sizes[name] for name in buckets[each.name])
            assert each.nbytes == expected
            assert each.about["dtype"] == "float32"


def test_a_group_of_the_users_tells_count_and_bytes(slow_job):
    (group,) = [c for c in slow_job[1][0].collectives if c.name == "allreduce.mine"]
    assert (group.about["count"], group.about["bytes"]) == (2, 32)


def test_each_file_records_which_rank_was_ready_when(slow_job):
    for recording in slow_job[1]:
        steps = [c for c in recording.collectives if "bucket" in c.name]
        assert all(set(each.ready) == {0, 1} for each in steps)
        late = [each.ready[1] - each.ready[0] for each in steps]
        assert median(late) > SLOW * 1e6 / 2  # microseconds
        for each in steps:  # a rank's own tick is where it began to negotiate
            assert each.ready[recording.rank] <= each.submitted + 1


def test_waits_and_steps_are_recorded(slow_job):
    for recording in slow_job[1]:
        (steps,) = recording.steps.values()
        (backwards,) = recording.backwards.values()
        assert [step.number for step in steps] == list(range(2, STEPS + 1))
        assert [each.number for each in backwards] == list(range(2, STEPS + 1))
        for step, backward in zip(steps, backwards, strict=True):
            assert step.began <= backward.began <= backward.ended <= step.ended
        assert any(wait.what == "allreduce.mine" for wait in recording.waits)


def test_the_report_blames_the_slow_rank(slow_job, tmp_path, capsys):
    paths, recordings = slow_job
    found = analyse(align(recordings))
    (rank, times) = found.slowest_counts.most_common(1)[0]
    assert rank == 1
    assert times > len(found.steps) / 2
    assert found.share(0, "wait") > found.share(1, "wait")
    assert main(["report", "--html", str(tmp_path / "r.html"), *paths]) == 0
    text = capsys.readouterr().out
    assert "1. rank 1 is slow" in text
    assert "data loading" in text
    assert "rank 1 is slow" in (tmp_path / "r.html").read_text()


def test_one_file_of_the_two_blames_it_too(slow_job, capsys):
    assert main(["report", slow_job[0][0]]) == 0
    text = capsys.readouterr().out
    assert "The files of rank 1 are not here" in text
    assert "1. rank 1 is slow" in text


def test_merged_it_is_a_valid_trace_with_arrows_from_the_slow_rank(slow_job, tmp_path):
    out = tmp_path / "all.json"
    assert main(["merge", str(out), *slow_job[0]]) == 0
    events = json.loads(out.read_text())
    check(events)
    steps = {e["name"] for e in events if e["name"].startswith("step ")}
    assert f"step {STEPS}" in steps
    sources = [e["tid"] // 1000 for e in events if e["ph"] == "s"]
    assert sources.count(1) > len(sources) / 2


def test_a_truncated_file_still_merges_and_reports(slow_job, tmp_path, capsys):
    cut = []
    for path in slow_job[0]:
        data = Path(path).read_bytes()
        (tmp_path / Path(path).name).write_bytes(data[: len(data) * 2 // 3])
        cut.append(str(tmp_path / Path(path).name))
    assert main(["merge", str(tmp_path / "all.json"), *cut]) == 0
    check(json.loads((tmp_path / "all.json").read_text()))
    assert main(["report", *cut]) == 0
    assert "2 ranks on 1 host" in capsys.readouterr().out


# -- clocks, and recordings that begin and end at different times ----------------------------


def shift_clock() -> None:
    """From now on the clocks of this process are ahead."""
    counter, counter_ns, epoch_ns = time.perf_counter, time.perf_counter_ns, time.time_ns
    nanoseconds = int(SHIFT * 1e9)
    time.perf_counter = lambda: counter() + SHIFT
    time.perf_counter_ns = lambda: counter_ns() + nanoseconds
    time.time_ns = lambda: epoch_ns() + nanoseconds


def _wrong_clock(rank: int, size: int, path: str) -> int:
    if rank == 1:
        shift_clock()
    hvd.init()
    for step in range(30):
        if step == 2 + 3 * rank:  # not at the same time
            hvd.start_timeline(path)
        hvd.allreduce(torch.ones(10), name="same")
        hvd.allreduce(torch.ones(10), name=f"own {step % 3}")
    last = hvd.join()
    hvd.stop_timeline()
    for _ in range(3):
        hvd.allreduce(torch.ones(10), name="same")
    hvd.shutdown()
    return last


@pytest.fixture(scope="module")
def wrong_clock(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    folder = tmp_path_factory.mktemp("clock")

    def environment(rank: int) -> dict[str, str]:
        local = {"LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": 2}
        names = {f"HOROVOD_{name}": str(value) for name, value in local.items()}
        return {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_HOSTNAME": f"host{rank}", **names}

    run_ranks(_wrong_clock, 2, f"{folder}/run.json", env=environment)
    return read_recordings(paths_in(folder))


def test_recordings_that_began_at_different_times_are_matched_by_number(wrong_clock):
    first, second = [[c.key for c in r.collectives if c.agreed is not None] for r in wrong_clock]
    assert len(first) > len(second)
    assert first[-len(second) :] == second


def test_a_wrong_clock_is_found_out(wrong_clock):
    first, second = wrong_clock
    difference = estimate(compare([first], [second]))
    shift = difference.leads[0] + second.clock - first.clock
    assert shift == pytest.approx(SHIFT * 1e6, abs=0.5e6)  # microseconds; messages take less
    one, other = align(wrong_clock)
    theirs = {c.key: c for c in other.collectives}
    both = [(c, theirs[c.key]) for c in one.collectives if c.agreed and c.key in theirs]
    assert len(both) > 40
    for ours, peer in both:  # nobody agrees before the other has submitted
        assert ours.agreed >= peer.submitted - 5
        assert peer.agreed >= ours.submitted - 5


def test_a_join_ends_in_the_timeline(wrong_clock):
    for recording in wrong_clock:
        (join,) = [each for each in recording.collectives if each.kind == "JOIN"]
        assert join.agreed is not None


# -- killed jobs -----------------------------------------------------------------------------


def _train_for_ever(rank: int, size: int) -> None:
    hvd.init()
    train(rank, 3)
    tell("in place")
    train(rank, 10**9)


def test_a_killed_job_can_be_merged_and_explained(tmp_path, capsys):
    env = {"HOROVOD_TIMELINE": str(tmp_path / "run.json")}
    with start_ranks(_train_for_ever, 2, env=env) as ranks:
        for rank in range(2):
            ranks.heard(rank)
        for rank in range(2):
            ranks.signal(rank, signal.SIGKILL)
        ranks.wait()
    paths = paths_in(tmp_path)
    assert main(["merge", str(tmp_path / "all.json"), *paths]) == 0
    check(json.loads((tmp_path / "all.json").read_text()))
    assert main(["report", *paths]) == 0
    assert "Where a step goes" in capsys.readouterr().out


# -- two hosts -------------------------------------------------------------------------------


def _on_two_hosts(rank: int, size: int, folder: str) -> None:
    if rank >= 2:  # all ranks of a host have its clock
        shift_clock()
    hvd.init()
    train(rank, STEPS, folder)
    hvd.shutdown()


def test_a_job_on_two_hosts_with_clocks_that_differ(tmp_path, capsys):
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    env = {"HOROVOD_TIMELINE": str(tmp_path / "run.json")}
    (tmp_path / "late").mkdir()
    with Hosts(2) as hosts:
        hosts.run(_on_two_hosts, [2, 2], str(tmp_path / "late"), env=env)
    paths = paths_in(tmp_path, 4)
    assert main(["merge", str(tmp_path / "all.json"), *paths]) == 0
    events = json.loads((tmp_path / "all.json").read_text())
    check(events)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["host host0", "host host1"]
    recordings = align(read_recordings(paths))
    length = max(r.ended for r in recordings)
    assert length < SHIFT * 1e6 / 10  # and not the hours by which the clocks differ
    found = analyse(recordings)
    assert found.slowest_counts.most_common(1)[0][0] == 1
    capsys.readouterr()
    assert main(["report", *paths]) == 0
    text = capsys.readouterr().out
    assert "4 ranks on 2 hosts" in text
    assert "Rank 1 (host host0) computes" in " ".join(text.split())
