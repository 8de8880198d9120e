"""Python objects and model parameters between ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool


def _broadcast_object(objects: list[Any], root: int, name: str | None) -> tuple[Any, bool]:
    mine = objects[hvd.rank()]
    received = hvd.broadcast_object(mine, root, name)
    return received, received is mine


@pytest.mark.parametrize("name", [None, "settings"])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_object_of_differing_types(pool3: RankPool, name: str | None, root: int):
    objects: list[Any] = [{"lr": 0.1, "betas": (0.9, 0.99)}, None, [1, "two", {3}]]
    for rank, (received, same) in enumerate(pool3.run(_broadcast_object, objects, root, name)):
        assert received == objects[root]
        assert type(received) is type(objects[root])
        assert same == (rank == root)


def _large_object() -> int:
    received = hvd.broadcast_object(b"x" * 3_000_000 if hvd.rank() == 0 else None)
    return len(received)


def test_a_large_object(pool2: RankPool):
    assert pool2.run(_large_object) == [3_000_000] * 2


def _texts_of_many_lengths() -> list[int]:
    lengths = [0, 3_000, *range(4_060, 4_100), 9_000]
    return [len(hvd.broadcast_object("x" * each if hvd.rank() == 1 else "", 1)) for each in lengths]


def test_objects_around_the_size_of_the_first_message(pool2: RankPool):
    assert pool2.run(_texts_of_many_lengths) == [[0, 3_000, *range(4_060, 4_100), 9_000]] * 2


def _num_operations(length: int) -> list[int]:
    before = hvd.stats()["operations"]
    hvd.broadcast_object("x" * length, 0)
    between = hvd.stats()["operations"]
    hvd.allgather_object("x" * length)
    return [between - before, hvd.stats()["operations"] - between]


def test_small_objects_need_one_operation(pool2: RankPool):
    assert pool2.run(_num_operations, 100) == [[1, 1]] * 2
    assert pool2.run(_num_operations, 100_000) == [[2, 1]] * 2


def _functions() -> list[int]:
    offset = 10 * (hvd.rank() + 1)
    functions = hvd.allgather_object(lambda value: value + offset)
    return [function(1) for function in functions]


def test_allgather_object(pool3: RankPool):
    assert pool3.run(_functions) == [[11, 21, 31]] * 3


def _uneven_objects() -> list[int]:
    return [len(text) for text in hvd.allgather_object("x" * (100_000 * hvd.rank()), name="long")]


def test_objects_of_different_sizes(pool3: RankPool):
    assert pool3.run(_uneven_objects) == [[0, 100_000, 200_000]] * 3


def _unpicklable() -> tuple[str, str, list[int]]:
    bad = {"step": 0, "lock": threading.Lock()} if hvd.rank() == 1 else None
    with pytest.raises((TypeError, ValueError)) as gathering:
        hvd.allgather_object(bad)
    with pytest.raises((TypeError, ValueError)) as sending:
        hvd.broadcast_object(bad, 1)
    return str(gathering.value), str(sending.value), hvd.allgather_object(hvd.rank())


def test_an_object_that_cannot_be_pickled_raises_everywhere(pool2: RankPool):
    why = "cannot pickle '_thread.lock' object"
    whole = f"TypeError: {why} (it is in the value of 'lock')"
    assert pool2.run(_unpicklable) == [
        (
            f"rank 1 could not pickle its object: {whole}",
            f"rank 1 could not pickle the object to broadcast: {whole}",
            [0, 1],
        ),
        (why, why, [0, 1]),
    ]


def _model() -> torch.nn.Module:
    torch.manual_seed(100 + hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    model[1].running_mean.fill_(hvd.rank())
    model[1].num_batches_tracked.fill_(hvd.rank())
    return model


def _parameters(form: str, root: int) -> list[list[float]]:
    model = _model()
    if form == "state_dict":
        hvd.broadcast_parameters(model.state_dict(), root)
    elif form == "named":
        hvd.broadcast_parameters(list(model.named_parameters()), root)
    elif form == "transposed":
        model[3].weight.data = model[3].weight.data.t().contiguous().t()
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    else:
        hvd.broadcast_parameters(list(model.parameters()), root)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    tensors = model.parameters() if form in ("named", "unnamed") else model.state_dict().values()
    return [tensor.flatten().tolist() for tensor in tensors]


@pytest.mark.parametrize("form", ["state_dict", "named", "unnamed", "transposed"])
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_parameters(pool2: RankPool, form: str, root: int):
    results = pool2.run(_parameters, form, root)
    assert results[0] == results[1]
    assert results[0] == pool2.run(_parameters_of_root, form)[root]


def _parameters_of_root(form: str) -> list[list[float]]:
    model = _model()
    tensors = model.parameters() if form in ("named", "unnamed") else model.state_dict().values()
    return [tensor.flatten().tolist() for tensor in tensors]


def _nothing_to_send() -> None:
    hvd.broadcast_parameters({}, 0)
    hvd.broadcast_parameters([], 0)


def test_no_parameters(pool2: RankPool):
    assert pool2.run(_nothing_to_send) == [None, None]


def _differing_models() -> float:
    parameters = {f"p{n}": torch.ones(n + 1) for n in range(4)}
    parameters["p2"] = torch.ones(3 + hvd.rank())
    for _ in range(2):  # nothing of the first attempt is left in flight
        with pytest.raises(hvd.HorovodInternalError, match="p2"):
            hvd.broadcast_parameters(parameters, 0)
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))


def test_models_that_differ_raise_everywhere(pool2: RankPool):
    assert pool2.run(_differing_models) == [2.0, 2.0]


def _twice() -> float:
    with pytest.raises(ValueError, match="'a'"):
        hvd.broadcast_parameters([("a", torch.ones(1)), ("a", torch.ones(1))], 0)
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))


def test_parameters_of_the_same_name(pool2: RankPool):
    assert pool2.run(_twice) == [2.0, 2.0]
