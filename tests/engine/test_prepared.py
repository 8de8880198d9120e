"""Repeating an allreduce the short way, and when there is none."""

from __future__ import annotations

import os

import pytest
import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import Adasum, Average, ReduceOp, Sum
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.execution.prepared import PreparedAllreduce
from horovod.engine.runtime import runtime
from tests.ranks import RankPool, run_ranks


def _prepared(
    tensors: list[torch.Tensor], name: str, op: ReduceOp = Sum, prescale: float = 1.0
) -> PreparedAllreduce | None:
    reduction = Reduction(op, prescale)
    collective = Collective(Kind.ALLREDUCE, name, reduction=reduction, labels=("a",))
    request = runtime.submit(collective, tensors, tensors, background=False)
    request.wait()
    return runtime.prepare(request)


def _repeat(shape: tuple[int, ...], count: int) -> list[float]:
    """One way and the other: inline, and as requests that the background thread runs."""

    def tensors(value: float) -> list[torch.Tensor]:
        return [torch.full(shape, float(value)) for _ in range(count)]

    prepared = _prepared(tensors(1), "repeated", Average)
    assert prepared is not None
    results = []
    for turn in range(3):
        inline, later = tensors(turn + runtime.topology.rank), tensors(2.0 * turn)
        vector = [t.view(-1) for t in inline] if count == 1 else inline
        while not prepared.allreduce_inline(vector):
            pass  # the background thread may not have let go yet
        prepared.start(later, background=True).wait()
        results += [float(sum(t.sum() for t in each)) / count for each in (inline, later)]
    return results


@pytest.mark.parametrize(("shape", "count"), [((3,), 1), ((2, 3), 1), ((2,), 3), ((50_000,), 2)])
def test_repeating_it(pool2: RankPool, shape: tuple[int, ...], count: int):
    size = float(torch.Size(shape).numel())
    expected = [size * value for turn in range(3) for value in (turn + 0.5, 2.0 * turn)]
    assert pool2.run(_repeat, shape, count) == [expected] * 2


def _what_can_be() -> dict[str, bool]:
    floats = [torch.ones(2), torch.ones(3)]
    ways = {
        "floats": _prepared(floats, "floats"),
        "integers": _prepared([torch.ones(2, dtype=torch.int32)], "integers"),
        "mixed": _prepared([torch.ones(2), torch.ones(2).double()], "mixed"),
        "scaled before": _prepared(floats, "scaled before", prescale=2.0),
        "adasum": _prepared(floats, "adasum", op=Adasum),
        # Three of them fit the fusion threshold, so a request for four is cut.
        "one large": _prepared([torch.ones(1000)], "one large"),
        "several": _prepared([torch.ones(30) for _ in range(3)], "several"),
        "too many": _prepared([torch.ones(30) for _ in range(4)], "too many"),
    }
    return {name: prepared is not None for name, prepared in ways.items()}


def _with_little_fusion(rank: int, size: int) -> dict[str, bool]:
    runtime.init()
    return _what_can_be()


def test_only_what_every_rank_does_with_one_collective_is_prepared():
    threshold = {"HOROVOD_FUSION_THRESHOLD": "360"}
    for found in run_ranks(_with_little_fusion, 2, env=threshold):
        assert {name for name, is_prepared in found.items() if is_prepared} == {
            "floats",
            "one large",
            "several",
        }


def _something_in_the_way() -> tuple[bool, list[float]]:
    """An earlier request, which keeps its turn."""
    prepared = _prepared([torch.ones(1)], "in order")
    assert prepared is not None
    earlier, later = torch.ones(1), torch.full((1,), 2.0)
    with runtime.channel(0).driving:  # so that nobody runs it meanwhile
        request = runtime.submit(
            Collective(Kind.ALLREDUCE, "earlier"), [earlier], [earlier], background=False
        )
        refused = not prepared.allreduce_inline([later])
    second = prepared.start([later], background=False)
    return refused, [float(each.wait()[0]) for each in (second, request)]


def test_it_does_not_overtake(pool2: RankPool):
    assert pool2.run(_something_in_the_way) == [(True, [4.0, 2.0])] * 2


def _of_an_earlier_job(rank: int, size: int) -> tuple[bool, str, bool]:
    runtime.init()
    prepared = _prepared([torch.ones(1)], "again")
    assert prepared is not None
    runtime.shutdown()
    runtime.init()
    tensor = torch.ones(1)
    refused = not prepared.allreduce_inline([tensor])
    try:
        prepared.start([tensor], background=False)
        message = ""
    except HorovodInternalError as error:
        message = str(error)
    new = _prepared([tensor], "again")
    return refused, message, new is not None and new.allreduce_inline([tensor])


def test_that_of_an_earlier_job_refuses():
    expected = True, "Horovod has been shut down", True
    assert run_ranks(_of_an_earlier_job, 2) == [expected] * 2


def _in_a_child(rank: int, size: int) -> tuple[str, float]:
    runtime.init()
    prepared = _prepared([torch.ones(1)], "parent's")
    assert prepared is not None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = f"refused: {not prepared.allreduce_inline([torch.ones(1)])} "
        try:
            prepared.start([torch.ones(1)], background=False)
        except HorovodInternalError as error:
            message += str(error)
        os.write(writer, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    tensor = torch.ones(1)
    assert prepared.allreduce_inline([tensor])
    return os.read(reader, 4096).decode(), float(tensor)


def test_a_forked_child_cannot_use_that_of_its_parent():
    for message, total in run_ranks(_in_a_child, 2):
        assert message.startswith("refused: True Horovod was initialised in the process that")
        assert total == 2.0


def _mismatched() -> str:
    """Rank 1 has gone on to something else under the same name: the request tells it all."""
    prepared = _prepared([torch.ones(2)], "tree")
    assert prepared is not None
    try:
        if runtime.topology.rank == 0:
            while not prepared.allreduce_inline([torch.ones(2)]):
                pass  # the background thread of an earlier request may not have let go yet
        else:
            other = [torch.ones(2)]
            collective = Collective(Kind.ALLREDUCE, "tree", labels=("b",))
            runtime.submit(collective, other, other, background=False).wait()
    except HorovodInternalError as error:
        return str(error)
    return ""


def test_where_ranks_differ_labels_are_still_known(pool2: RankPool):
    for message in pool2.run(_mismatched):
        assert "mismatched tree" in message
        assert "a float32[2] on rank 0" in message
        assert "b float32[2] on rank 1" in message
