"""Groups whose tensors the user calls something: ranks that differ are told by these labels."""

from __future__ import annotations

import pytest
import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime
from tests.ranks import RankPool


def _reduce(labels: list[tuple[str, ...]], sizes: list[tuple[int, ...]]) -> str | float:
    rank = runtime.topology.rank
    tensors = [torch.ones(size) for size in sizes[rank]]
    collective = Collective(Kind.ALLREDUCE, "labelled", labels=labels[rank])
    request = runtime.submit(collective, tensors, tensors, background=False)
    try:
        request.wait()
    except HorovodInternalError as error:
        return str(error)
    return tensors[0][0].item()


@pytest.mark.parametrize(
    ("labels", "sizes", "shown"),
    [
        ([("a", "b"), ("a", "c")], [(1, 2), (1, 2)], ["b float32[2] on rank 0", "c float32[2] on"]),
        ([("a", "b"), ("a", "b")], [(1, 2), (1, 3)], ["b float32[2] on rank 0", "b float32[3] on"]),
        ([("a", "b"), ("b", "a")], [(1, 1), (1, 1)], ["a float32[1], b float32[1] on rank 0"]),
        ([("a", "b"), ("a",)], [(1, 2), (1,)], ["b float32[2] on rank 0", "none of these on rank"]),
    ],
)
def test_labels_that_differ(
    pool2: RankPool, labels: list[tuple[str, ...]], sizes: list[tuple[int, ...]], shown: list[str]
):
    first, second = pool2.run(_reduce, labels, sizes)
    assert first == second
    assert "'allreduce.labelled': mismatched tree between ranks: " in first
    for text in shown:
        assert text in first


def test_labels_that_agree(pool2: RankPool):
    assert pool2.run(_reduce, [("a", "b")] * 2, [(1, 2)] * 2) == [2.0, 2.0]


def test_many_labels_are_cut_short(pool2: RankPool):
    labels = [tuple(f"{rank}.{index}" for index in range(10)) for rank in range(2)]
    message, _ = pool2.run(_reduce, labels, [(1,) * 10] * 2)
    assert "and 4 more" in message
    assert "0.5" in message
    assert "0.6" not in message
