"""Agreement between real ranks: any order of submission, mismatches, joins, sets, threads."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.engine.agreement.request_queue import RequestQueue
from horovod.engine.agreement.waiters import Waiters
from horovod.engine.channel import Channel
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from tests.effort import examples
from tests.ranks import RankPool, run_ranks


def start(tensor: torch.Tensor, collective: Collective) -> Request:
    return runtime.submit(collective, [tensor], [tensor])


def allreduce(name: str | None, *reduction: Any) -> Collective:
    return Collective(Kind.ALLREDUCE, name, reduction=Reduction(*reduction))


def reduce(tensor: torch.Tensor, name: str | None, *reduction: Any) -> torch.Tensor:
    return start(tensor, allreduce(name, *reduction)).wait()[0]


def shuffled_orders(seed: int, count: int) -> list[float]:
    rank = runtime.topology.rank
    names = [f"t{i}" for i in range(count)]
    random.Random(seed * 31 + rank).shuffle(names)
    pauses = random.Random(seed + rank)
    handles = {}
    for name in names:
        value = torch.full((int(name[1:]) % 5 + 1,), float(rank + int(name[1:])))
        handles[name] = start(value, allreduce(name))
        if pauses.random() < 0.3:
            handles[name].done()
        if pauses.random() < 0.05:
            list(handles.values())[-1].done()
    random.Random(seed + 7 * rank).shuffle(names)
    results = {name: handles[name].wait()[0][0].item() for name in names}
    return [results[f"t{i}"] for i in range(count)]


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 60))
def test_ranks_may_submit_in_any_order(pool3: RankPool, seed: int, count: int) -> None:
    expected = [3 * i + 0 + 1 + 2 for i in range(count)]
    assert pool3.run(shuffled_orders, seed, count) == [expected] * 3


def late_partner() -> bool:
    """Rank 1 brings its part only after rank 0's request has been in flight for a while."""
    first = torch.ones(1)
    if runtime.topology.rank == 0:
        handle = start(first, allreduce("late"))
        reduce(torch.ones(1), "other")  # cannot be agreed on as a prefix: needs settling
        return bool(handle.wait()[0] == 2)
    reduce(torch.ones(1), "other")
    return bool(reduce(first, "late") == 2)


def test_an_operation_overtakes_one_that_others_have_not_submitted(pool2: RankPool) -> None:
    assert pool2.run(late_partner) == [True, True]


def crossed_kinds() -> str:
    try:
        if runtime.topology.rank == 0:
            reduce(torch.ones(2), "thing")
        else:
            start(torch.ones(2), Collective(Kind.ALLGATHER, "thing")).wait()
    except HorovodInternalError as error:
        return str(error)
    return ""


def test_the_same_name_for_different_operations_fails_everywhere(pool2: RankPool) -> None:
    for message in pool2.run(crossed_kinds):
        assert "mismatched operation" in message
        assert "allreduce on rank 0" in message
        assert "allgather on rank 1" in message
        assert "test_channel.py" in message
    assert pool2.run(add_up) == [1.0, 1.0]


def add_up() -> float:
    return float(reduce(torch.tensor([float(runtime.topology.rank)]), "sum"))


def mismatches() -> list[str]:
    rank = runtime.topology.rank
    messages = []
    for name, make in {
        "shape": lambda: reduce(torch.ones(2 + rank), "shape"),
        "dtype": lambda: reduce(torch.ones(2, dtype=(torch.int32, torch.int64)[rank]), "dtype"),
        "reduction": lambda: reduce(torch.ones(2), "reduction", (ReduceOp.MIN, ReduceOp.MAX)[rank]),
        "prescale": lambda: reduce(torch.ones(2), "prescale", ReduceOp.SUM, 1.0 + rank),
        "root rank": lambda: start(
            torch.ones(1), Collective(Kind.BROADCAST, "root rank", root_rank=rank)
        ).wait(),
    }.items():
        try:
            make()
            messages.append("nothing")
        except HorovodInternalError as error:
            messages.append(str(error) if name in str(error) else f"no {name} in {error}")
    return messages


def test_mismatches_name_both_values_and_leave_the_job_working(pool2: RankPool) -> None:
    both = pool2.run(mismatches)
    assert both[0] == both[1]
    for message in both[0]:
        assert "rank 0" in message
        assert "rank 1" in message
        assert "test_channel.py" in message
    assert pool2.run(add_up) == [1.0, 1.0]


def join_with(op_name: str, dtype_name: str) -> tuple[int, list[float]]:
    """Rank r has r + 1 batches."""
    rank, op, dtype = runtime.topology.rank, ReduceOp[op_name], getattr(torch, dtype_name)
    seen = []
    for index in range(rank + 1):
        value = torch.full((2,), rank + 2).to(dtype)
        seen.append(float(reduce(value, f"batch{index}", op)[0]))
    return runtime.join().wait(), seen


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
@pytest.mark.parametrize("op", ["SUM", "AVERAGE", "MIN", "MAX", "PRODUCT"])
def test_joined_ranks_contribute_what_changes_nothing(pool3: RankPool, op: str, dtype: str) -> None:
    present = [[2, 3, 4], [3, 4], [4]]  # who still takes part in batch 0, 1, 2
    combine = {
        "SUM": sum,
        "AVERAGE": lambda values: sum(values) / 3,
        "MIN": min,
        "MAX": max,
        "PRODUCT": lambda values: torch.tensor(values).prod().item(),
    }[op]
    expected = [float(combine(values)) for values in present]
    if dtype == "int32":
        expected = [float(int(value)) for value in expected]
    outcomes = pool3.run(join_with, op, dtype)
    assert [last for last, _ in outcomes] == [2, 2, 2]
    for rank, (_, seen) in enumerate(outcomes):
        assert seen == pytest.approx(
            expected[: rank + 1], rel=1e-2 if dtype == "bfloat16" else 1e-6
        )


def require_all(reason: str) -> Request:
    return runtime.submit(Collective(Kind.REQUIRE_ALL, "all here", reason=reason))


def joined_but_required() -> tuple[str, list[float], int]:
    """Rank 1 has joined when the others need it."""
    require_all("nobody is missing").wait()
    try:
        if runtime.topology.rank == 1:
            runtime.join().wait()
        else:
            reduce(torch.ones(1), None)  # goes on, and uses up an automatic name
            require_all("it has the key").wait()
        message = "nothing"
    except HorovodInternalError as error:
        message = str(error)
    sums = [float(reduce(torch.ones(1), None)) for _ in range(2)]
    return message, sums, runtime.join().wait()


def test_what_requires_all_fails_where_a_rank_has_joined_and_so_does_its_join(
    pool3: RankPool,
) -> None:
    outcomes = pool3.run(joined_but_required)
    for message, sums, last in outcomes:
        assert message == outcomes[0][0]
        assert message.startswith("rank 1")
        assert "has joined, and rank 0" in message
        assert "test_channel.py" in message
        assert message.endswith("it has the key")
        assert sums == [3.0, 3.0]  # nobody counts as joined any more, and names agree
        assert last in range(3)


def two_sets_at_once() -> list[float]:
    """Rank 1 works for set {0, 1} and set {1, 2} in an order that neither of the others knows."""
    rank = runtime.topology.rank
    left = runtime.add_process_set([0, 1])
    right = runtime.add_process_set([1, 2])
    ids = [set_id for set_id, ranks in ((left, (0, 1)), (right, (1, 2))) if rank in ranks]
    handles = []
    for index in range(20):
        order = ids if index % 3 else ids[::-1]
        for set_id in order:
            value = torch.tensor([float(rank)])
            handles.append(start(value, Collective(Kind.ALLREDUCE, f"v{index}", set_id)))
    results = [float(handle.wait()[0]) for handle in reversed(handles)]
    runtime.remove_process_set(right)
    runtime.remove_process_set(left)
    return sorted(set(results))


def test_overlapping_sets_do_not_block_each_other(pool3: RankPool) -> None:
    assert pool3.run(two_sets_at_once) == [[1.0], [1.0, 3.0], [3.0]]


def many_threads() -> bool:
    """Four threads of each rank submit and wait at once."""
    wrong = []

    def work(number: int) -> None:
        for step in range(25):
            value = torch.full((3,), float(number))
            if float(reduce(value, f"thread{number}.{step}")[0]) != 2.0 * number:
                wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not wrong


def test_threads_may_submit_and_wait_together(pool2: RankPool) -> None:
    assert pool2.run(many_threads) == [True, True]


def huge_backlog(count: int) -> bool:
    handles = []
    for index in range(count):
        value = torch.tensor([float(index)])
        handles.append(start(value, allreduce(f"b{index}", ReduceOp.AVERAGE)))
    return all(float(h.wait()[0]) == index for index, h in enumerate(handles))


def test_ten_thousand_outstanding_requests(pool2: RankPool) -> None:
    assert pool2.run(huge_backlog, 10_000) == [True, True]


def shut_down_early(rank: int, size: int) -> str:
    runtime.init()
    if rank == 0:
        runtime.shutdown()
        return ""
    try:
        reduce(torch.ones(1), "alone")
    except HorovodInternalError as error:
        return str(error)
    finally:
        runtime.shutdown()
    return "nothing raised"


def test_waiting_for_a_rank_that_shut_down_is_an_error_naming_it() -> None:
    assert "rank 0 has shut down" in run_ranks(shut_down_early, 2)[1]


class _ClosingChannel(Channel):
    """A channel that another thread has closed, and whose requests that thread fails a bit later.

    It tells the other ranks of the failure in between, which may take seconds.
    """

    def __init__(self) -> None:
        self.driving = threading.Lock()
        self.waiters = Waiters()
        self.queue = RequestQueue()
        self.observer: Any = SimpleNamespace(
            waiting=lambda request: nullcontext(), waited_for=lambda request, began: None
        )
        self.num_rounds = 0
        self.queue.close(HorovodInternalError("rank 1 is lost"))

    def _guarded_round(self) -> None:
        self.num_rounds += 1
        assert self.num_rounds == 1, "the thread does not sleep"

    def wait_beside(self, request: Request, seconds: float) -> None:
        assert self.failure is not None
        request.fail(self.failure)


def test_a_thread_whose_request_another_one_fails_sleeps_until_then() -> None:
    channel = _ClosingChannel()
    request = Request(channel, allreduce("a"), "a", b"")
    with pytest.raises(HorovodInternalError, match="rank 1 is lost"):
        request.wait()
