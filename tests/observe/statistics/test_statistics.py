"""What is counted, between real ranks; and how numbers of scripts are checked."""

from __future__ import annotations

import math
import tempfile
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from horovod.engine.runtime import runtime
from horovod.observe.statistics.counters import Counters, Totals
from horovod.observe.statistics.process import MOST_NAMES, MOST_VALUES, Statistics
from tests.ranks import RankPool, check_times, run_ranks

TCP = {"HOROVOD_CPU_OPERATIONS": "gloo"}


def hosts(rank: int) -> dict[str, str]:
    """Two hosts with two ranks each, as far as the transports can tell."""
    host, local = divmod(rank, 2)
    return {
        "HOROVOD_HOSTNAME": f"host{host}",
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": str(host),
        "HOROVOD_CROSS_SIZE": "2",
    }


def change(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in after.items() if isinstance(value, (int, float))}
    return {key: value - before[key] for key, value in numbers.items()}


# -- waiting and reducing ------------------------------------------------------------------------


def sleepy(folder: str, late: int, seconds: float, repeats: int, way: str) -> dict[str, Any]:
    """A rank begins to sleep once the others have come to their calls, however slow they are."""
    tensor = torch.ones(500)
    hvd.allreduce_(tensor, name="sleepy")
    hvd.barrier()
    before = hvd.stats()
    for turn in range(repeats):
        if hvd.rank() == late:
            others = [Path(folder, f"{turn}.{rank}") for rank in range(hvd.size()) if rank != late]
            while not all(file.exists() for file in others):
                time.sleep(0.001)  # between looks at the file system
            time.sleep(seconds)
        else:
            Path(folder, f"{turn}.{hvd.rank()}").touch()
        if way == "inline":
            hvd.allreduce_(tensor, name="sleepy")
        elif way == "request":
            hvd.grouped_allreduce_([tensor, torch.ones(3)], name="grouped")
        else:
            hvd.synchronize(hvd.allreduce_async_(tensor, name="background"))
    return change(before, hvd.stats())


@pytest.mark.parametrize("way", ["inline", "request", "background"])
@pytest.mark.parametrize("late", [0, 1])
def test_the_time_of_a_late_rank_is_the_waiting_of_the_others(pool3: RankPool, late: int, way: str):
    def measure() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            return pool3.run(sleepy, folder, late, 0.3, 2, way)

    def check(found: list[dict[str, Any]]) -> None:
        for rank, numbers in enumerate(found):
            assert numbers["operations"] == 2
            if rank != late:
                assert numbers["wait_seconds"] > 0.3
                assert numbers["wait_seconds"] > found[late]["wait_seconds"]

    check_times(measure, check)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1), st.floats(0.1, 0.3), st.integers(1, 2))
def test_others_wait_as_long_as_the_late_one_sleeps(
    pool2: RankPool, late: int, seconds: float, repeats: int
):
    def measure() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            return pool2.run(sleepy, folder, late, seconds, repeats, "inline")

    def check(found: list[dict[str, Any]]) -> None:
        waited = [numbers["wait_seconds"] for numbers in found]
        assert waited[1 - late] > 0.5 * seconds * repeats
        assert waited[1 - late] > waited[late]

    check_times(measure, check)


def stats_between_rounds() -> dict[str, Any]:
    """While no round is being counted: a thread completes requests before it has counted all."""
    with runtime.channel(0).driving:
        return hvd.stats()


def in_the_background() -> dict[str, Any]:
    """Reductions while the program does something else, and then such that it waits for."""
    hvd.barrier()
    before = stats_between_rounds()
    for number in range(3):
        if hvd.rank() == 1:
            time.sleep(0.05)
        handle = hvd.allreduce_async_(torch.ones(1000), name=f"beside.{number}")
        while not hvd.poll(handle):
            time.sleep(0.001)
        hvd.synchronize(handle)
    between = stats_between_rounds()
    for _ in range(3):
        hvd.allreduce_(torch.ones(1000), name="waited for")
    after = stats_between_rounds()
    return {"beside": change(before, between), "waited": change(between, after)}


def test_what_the_program_does_not_wait_for_is_hidden(pool2: RankPool):
    def check(found: list[dict[str, Any]]) -> None:
        for numbers in found:
            beside, waited = numbers["beside"], numbers["waited"]
            busy = beside["wait_seconds"] + beside["reduce_seconds"]
            assert busy > 0
            assert beside["hidden_seconds"] == pytest.approx(busy, abs=1e-6)
            assert waited["hidden_seconds"] == 0
            assert waited["wait_seconds"] + waited["reduce_seconds"] > 0

    # A background thread that is slow to go to sleep may run what is waited for.
    check_times(lambda: pool2.run(in_the_background), check)


# -- bytes ---------------------------------------------------------------------------------------


def all_operations() -> dict[str, int]:
    size = hvd.size()
    hvd.barrier()
    before = hvd.stats()
    for _ in range(3):
        hvd.allreduce_(torch.ones(10), name="repeated")  # 120 bytes, the last two by the short way
    hvd.grouped_allreduce([torch.ones(5), torch.ones(5, dtype=torch.float64)])  # 60
    hvd.synchronize(hvd.allreduce_async(torch.ones(7, dtype=torch.int32)))  # 28
    hvd.reducescatter(torch.ones(2 * size, 3))  # 24 size
    hvd.allgather(torch.ones(4, 2))  # 32
    hvd.broadcast(torch.ones(6), 0)  # 24
    hvd.alltoall(torch.ones(3 * size))  # 12 size
    hvd.barrier()
    found = change(before, hvd.stats())
    return {key: found[key] for key in found if key.startswith("bytes") or key == "operations"}


@pytest.mark.parametrize(
    ("size", "env", "media"),
    [
        (1, None, ()),
        (2, None, ("shared_memory",)),
        (2, TCP, ("network",)),
        (4, hosts, ("shared_memory", "network")),
    ],
    ids=["one rank", "shared memory", "TCP", "two hosts"],
)
def test_bytes_by_transport(size: int, env: Any, media: tuple[str, ...]):
    reduced = 120 + 60 + 28 + 24 * size
    moved = reduced + 32 + 24 + 12 * size
    expected = {f"bytes_{m}": 0 for m in ("shared_memory", "network", "device")}
    expected |= {f"bytes_{medium}": moved for medium in media}

    def run(rank: int, size: int) -> dict[str, int]:
        hvd.init()
        return all_operations()

    for found in run_ranks(run, size, env=env):
        assert found == {**expected, "bytes_reduced": reduced, "operations": 10}


def compressed(rank: int, size: int) -> list[dict[str, Any]]:
    hvd.init()
    model = torch.nn.Linear(9, 1)  # 10 numbers
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.fp16
    )
    found = []
    for _ in range(3):
        before = hvd.stats()
        model(torch.ones(1, 9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(change(before, hvd.stats()))
    return found[1:]  # in the first step the ranks agree on more


def test_what_compression_keeps_off_the_network_is_not_counted():
    for steps in run_ranks(compressed, 2, env=TCP):
        for numbers in steps:
            assert (numbers["bytes_reduced"], numbers["bytes_network"]) == (40, 20)


# -- negotiation, queues ---------------------------------------------------------------------------


def crossing() -> list[int]:
    names = ["one", "two"] if hvd.rank() == 0 else ["two", "one"]
    hvd.barrier()
    before = hvd.stats()
    handles = [hvd.allreduce_async(torch.ones(1), name=f"crossing.{name}") for name in names]
    for handle in handles:
        hvd.synchronize(handle)
    between = hvd.stats()
    for _ in range(3):
        hvd.allreduce(torch.ones(1), name="alike")
    after = hvd.stats()
    return [
        change(before, between)["negotiation_misses"],
        change(between, after)["negotiation_misses"],
    ]


def test_misses_are_operations_that_ranks_submit_in_different_orders(pool2: RankPool):
    for crossed, alike in pool2.run(crossing):
        assert crossed in (1, 2), "once one is out of the way, the other is the first everywhere"
        assert alike == 0


def queueing() -> list[int]:
    rank = hvd.rank()
    found = []
    handles = []
    if rank == 0:
        handles = [hvd.allreduce_async(torch.ones(1), name=f"queued.{n}") for n in range(5)]
        found.append(hvd.stats()["queue_length"])
    hvd.broadcast_object("the others come only now")
    if rank == 1:
        handles = [hvd.allreduce_async(torch.ones(1), name=f"queued.{n}") for n in range(5)]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.barrier()
    return [*found, hvd.stats()["queue_length"]]


def test_the_queue_is_what_has_not_run(pool2: RankPool):
    assert pool2.run(queueing) == [[5, 0], [0]]


# -- life ------------------------------------------------------------------------------------------


def again() -> list[Any]:
    hvd.allreduce(torch.ones(1))
    before = hvd.stats()
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"not initialised: call hvd\.init\(\) first"):
        hvd.stats()
    with pytest.raises(ValueError, match=r"not initialised: call hvd\.init\(\) first"):
        hvd.stats.log(loss=1.0)
    hvd.init()
    after = hvd.stats()
    return [before["operations"] > 0, after["operations"], after["bytes_reduced"]]


def test_init_begins_at_zero(pool2: RankPool):
    assert pool2.run(again) == [[True, 0, 0]] * 2


def sets() -> list[int]:
    before = hvd.stats()
    added = hvd.add_process_set([0, 1])
    first = hvd.stats()
    hvd.allreduce(torch.ones(10), process_set=added)
    second = hvd.stats()
    hvd.remove_process_set(added)
    third = hvd.stats()
    assert before["operations"] <= first["operations"]
    return [
        change(first, second)["bytes_reduced"],
        change(second, third)["bytes_reduced"],
    ]


def test_what_a_removed_process_set_did_stays_counted():
    def run(rank: int, size: int) -> list[int]:
        hvd.init(process_sets="dynamic")
        hvd.add_process_set([1])
        return sets() if size == 2 else []

    def run_three(rank: int, size: int) -> list[int]:
        hvd.init(process_sets="dynamic")
        return sets() if rank < 2 else others()

    def others() -> list[int]:
        hvd.remove_process_set(hvd.add_process_set([0, 1]))
        return []

    assert run_ranks(run_three, 3) == [[40, 0], [40, 0], []]


def forked() -> str:
    import multiprocessing

    reader, writer = multiprocessing.Pipe(duplex=False)

    def ask() -> None:
        try:
            writer.send(str(hvd.stats()))
        except ValueError as error:
            writer.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    answer: str = reader.recv()
    process.join()
    return answer


def test_a_forked_child_is_told_that_the_numbers_are_its_parents(pool2: RankPool):
    for answer in pool2.run(forked):
        assert "was initialised in the process that this one was forked from" in answer


# -- without ranks ---------------------------------------------------------------------------------


def test_totals_add_up_over_channels():
    statistics = Statistics()
    first = statistics.open(("shared_memory",))
    second = statistics.open(("network",))
    assert first is not None
    assert second is not None
    first.bytes_inline, second.bytes_inline = 10, 20
    first.count(5, ("shared_memory",), True, 5)
    second.count(8, ("network",), False, 4)
    first.wait, second.wait = 1.0, 2.0
    expected = Totals(wait=3.0, reduced=35, shared_memory=15, network=24)
    assert statistics.totals() == expected
    statistics.close(first)
    assert statistics.totals() == expected
    statistics.restart()
    assert statistics.totals() == Totals()


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=120
    )
)
def test_the_steps_are_the_differences(steps: list[tuple[float, float, float]]):
    statistics = Statistics()
    counters = statistics.open(())
    assert counters is not None
    statistics.add_backward(0.5, 1)
    for wait, reduce, background in steps:
        counters.wait += wait
        counters.reduce += reduce
        counters.background += min(background, wait + reduce)
        statistics.end_step(buckets=2)
    recent = statistics.recent()
    assert [step.number for step in recent] == list(range(1, len(steps) + 1))
    for step, (wait, reduce, background) in zip(reversed(recent), reversed(steps), strict=False):
        assert step.wait == pytest.approx(wait, abs=1e-6)
        assert step.reduce == pytest.approx(reduce, abs=1e-6)
        assert step.hidden == pytest.approx(min(background, wait + reduce), abs=1e-6)
    assert statistics.buckets == 1 + 2 * len(steps)
    assert recent[-1].end - recent[0].end == pytest.approx(sum(s.seconds for s in recent[1:]))
    assert statistics.backward_seconds == 0.5


def test_a_first_step_that_nothing_is_known_of_has_no_time():
    statistics = Statistics()
    statistics.end_step()
    assert (statistics.steps, statistics.step_seconds, statistics.steps_per_second()) == (1, 0, 0)
    statistics.end_step()
    assert statistics.step_seconds > 0
    assert statistics.steps_per_second() > 0


def test_time_without_other_ranks_belongs_to_no_step():
    statistics = Statistics()
    for _ in range(2):
        statistics.end_step()
    statistics.reform()
    before = statistics.step_seconds
    time.sleep(0.05)
    statistics.end_step()
    assert statistics.step_seconds == before


def test_nothing_is_counted_where_nobody_counts():
    statistics = Statistics()
    statistics.enabled = False
    assert statistics.open(()) is None
    statistics.close(None)
    statistics.add_backward(1.0, 1)
    statistics.end_step()
    assert (statistics.steps, statistics.buckets) == (0, 0)


def test_hidden_is_never_more_than_there_was():
    counters = Counters()
    counters.background = 2.0
    assert counters.hidden() == 0.0
    counters.wait = 1.5
    assert counters.hidden() == 1.5
    counters.awaited = 3.0
    assert counters.hidden() == 0.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.ones((1, 1)), 1.0),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([2], dtype=torch.bfloat16), 2.0),
        (torch.ones(1, requires_grad=True) * 3, 3.0),
        (float("inf"), float("inf")),
        (10**400, float("inf")),
        (-(10**400), float("-inf")),
    ],
)
def test_numbers_of_scripts(value: Any, expected: float):
    statistics = Statistics()
    statistics.log({"x": value}, None)
    assert statistics.take_metrics() == {"x": [(0, expected)]}
    assert statistics.take_metrics() == {}


@pytest.mark.parametrize(
    ("values", "step", "message"),
    [
        ({"a": 1, "x": "1.0"}, None, "'x' must be a number or a tensor of one element, not str"),
        ({"a": 1, "x": None}, None, "not NoneType"),
        ({"a": 1, "x": 1j}, None, "not complex"),
        ({"a": 1, "x": [1.0]}, None, "not list"),
        ({"a": 1, "x": Decimal("nan")}, None, "not Decimal"),
        ({"a": 1, "x": torch.ones(2)}, None, "'x': Tensor is not one number"),
        ({"a": 1, "x": torch.ones(0)}, None, "'x': Tensor is not one number"),
        ({"a": 1, "x": np.ones(3)}, None, "'x': ndarray is not one number"),
        ({"a": 1, "x": np.array(["a"])}, None, "must be a number"),
        ({"a": 1, "": 1.0}, None, "name of a metric must be text"),
        ({"a": 1, 3: 1.0}, None, "name of a metric must be text, not 3"),
        ({"a": 1, "n" * 201: 1.0}, None, "200 characters at most; 'nnn.*'... has 201"),
        ({"a": 1}, -1, "step must not be negative"),
        ({"a": 1}, 1.5, "step must be a whole number, not 1.5"),
        ({"a": 1}, "3", "step must be a whole number"),
        ({f"n{i}": 1.0 for i in range(MOST_NAMES + 1)}, None, "100 different names"),
    ],
)
def test_what_is_no_number_is_refused_before_anything_is_kept(
    values: dict[Any, Any], step: Any, message: str
):
    statistics = Statistics()
    with pytest.raises(ValueError, match=message):
        statistics.log(values, step)
    assert statistics.take_metrics() == {}


def test_the_newest_values_are_kept():
    statistics = Statistics()
    for step in range(MOST_VALUES + 5):
        statistics.log({"loss": step}, step)
    kept = statistics.take_metrics()["loss"]
    assert kept == [(step, float(step)) for step in range(5, MOST_VALUES + 5)]


def test_without_a_step_it_is_the_last_one_of_the_optimizer():
    statistics = Statistics()
    for _ in range(3):
        statistics.end_step()
    statistics.log({"loss": math.nan}, None)
    ((step, value),) = statistics.take_metrics()["loss"]
    assert step == 3
    assert math.isnan(value)


def test_log_takes_a_dict_or_names(pool2: RankPool):
    def log() -> None:
        hvd.stats.log()
        hvd.stats.log({"a/b": 1}, c=2, step=np.int64(7))
        with pytest.raises(ValueError, match="takes a dict or names, as in"):
            hvd.stats.log(0.5)  # type: ignore[arg-type]

    pool2.run(log)
