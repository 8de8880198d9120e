"""Bad input: which error, on which ranks; and afterwards the job works as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool, run_ranks

SIZE = 3
ones = torch.ones
HIE = hvd.HorovodInternalError


def _rank_dependent(*choices: Any) -> Any:
    return choices[min(hvd.rank(), len(choices) - 1)]


def _works() -> bool:
    """Named and unnamed collectives of every kind still work on all ranks."""
    total = float(hvd.allreduce(ones(1), op=hvd.Sum))
    total += float(hvd.allreduce_(ones(1), name="e", op=hvd.Sum))
    total += float(hvd.allgather(ones(1), name="e").sum())
    total += float(hvd.alltoall(ones(SIZE), name="e").sum())
    total += float(hvd.reducescatter(ones(SIZE), name="e", op=hvd.Sum).sum())
    total += float(hvd.broadcast(ones(1), 0, name="e"))
    return total == 5.0 * SIZE + 1


# Raised on every rank that passes it, before anything is sent.
LOCAL: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "op and average": (
        ValueError,
        "either op or average",
        lambda: hvd.allreduce(ones(2), average=True, op=hvd.Sum),
    ),
    "unknown op": (ValueError, "op must be", lambda: hvd.allreduce(ones(2), op=17)),
    "average of bool": (
        ValueError,
        r"Average.*torch\.bool",
        lambda: hvd.allreduce(ones(2).bool(), name="e"),
    ),
    "average of bool in place": (
        ValueError,
        r"Average.*torch\.bool",
        lambda: hvd.allreduce_(ones(2).bool()),
    ),
    "minimum of complex": (
        ValueError,
        r"Min.*torch\.complex64",
        lambda: hvd.allreduce_async(ones(2).to(torch.complex64), op=hvd.Min),
    ),
    "scaled bool": (
        ValueError,
        r"torch\.bool",
        lambda: hvd.allreduce(ones(2).bool(), op=hvd.Sum, prescale_factor=2.0),
    ),
    "adasum of integers": (
        ValueError,
        r"Adasum.*torch\.int64",
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum),
    ),
    "type without arithmetic": (
        ValueError,
        r"torch\.float8_e4m3fn",
        lambda: hvd.allreduce(ones(2).to(torch.float8_e4m3fn)),
    ),
    "bad member of a group": (
        ValueError,
        r"torch\.bool",
        lambda: hvd.grouped_allreduce([ones(2), ones(2).bool()]),
    ),
    "type that cannot be sent": (
        ValueError,
        r"torch\.uint32",
        lambda: hvd.allgather(ones(2).to(torch.uint32)),
    ),
    "no tensor": (ValueError, "torch.Tensor", lambda: hvd.allreduce([1.0, 2.0])),
    "no tensor to send": (ValueError, "torch.Tensor", lambda: hvd.broadcast(3, 0)),
    "sparse tensor": (ValueError, "sparse", lambda: hvd.allreduce(ones(2).to_sparse())),
    "expanded in place": (
        ValueError,
        "share memory",
        lambda: hvd.allreduce_(ones(1).expand(4)),
    ),
    "expanded in place, async": (
        ValueError,
        "share memory",
        lambda: hvd.broadcast_async_(ones(1).expand(4), 0),
    ),
    "one tensor as a group": (ValueError, "list", lambda: hvd.grouped_allreduce(ones(2))),
    "empty group": (ValueError, "at least one", lambda: hvd.grouped_allgather([])),
    "group on two devices": (
        HIE,
        "device",
        lambda: hvd.grouped_allreduce([ones(2), torch.ones(2, device="meta")]),
    ),
    "root outside": (ValueError, "root", lambda: hvd.broadcast(ones(2), SIZE)),
    "negative root": (ValueError, "root", lambda: hvd.broadcast_async(ones(2), -1)),
    "splits of floats": (
        ValueError,
        r"int32.*torch\.float32",
        lambda: hvd.alltoall(ones(3), torch.ones(SIZE)),
    ),
    "splits of int64": (
        ValueError,
        r"int32.*torch\.int64",
        lambda: hvd.alltoall(ones(3), torch.ones(SIZE, dtype=torch.int64)),
    ),
    "splits in a list of floats": (
        ValueError,
        "integers",
        lambda: hvd.alltoall(ones(3), [1.0, 1.0, 1.0]),
    ),
    "splits of two dimensions": (
        ValueError,
        "one dimension",
        lambda: hvd.alltoall(ones(3), torch.ones(1, SIZE, dtype=torch.int32)),
    ),
    "too few splits": (ValueError, "split", lambda: hvd.alltoall(ones(3), [1, 2])),
    "splits beyond the rows": (ValueError, "split", lambda: hvd.alltoall(ones(3), [2, 2, 2])),
    "negative splits": (ValueError, "split", lambda: hvd.alltoall(ones(3), [-1, 2, 2])),
    "rows that do not divide": (
        ValueError,
        "divisible",
        lambda: hvd.alltoall_async(ones(SIZE + 1)),
    ),
    "allgather of a scalar": (
        ValueError,
        "dimension",
        lambda: hvd.allgather_async(torch.tensor(1.0)),
    ),
    "reducescatter of a scalar": (
        ValueError,
        "dimension",
        lambda: hvd.reducescatter(torch.tensor(1.0)),
    ),
    "reducescatter with Min": (
        HIE,
        "reducescatter",
        lambda: hvd.reducescatter(ones(3), op=hvd.Min),
    ),
    "reducescatter with Adasum": (
        HIE,
        "reducescatter",
        lambda: hvd.reducescatter_async(ones(3), op=hvd.Adasum),
    ),
    "reducescatter of integers with Adasum": (
        HIE,
        "reducescatter",
        lambda: hvd.reducescatter(ones(3).int(), op=hvd.Adasum),
    ),
    "grouped reducescatter of bool with Max": (
        HIE,
        "reducescatter",
        lambda: hvd.grouped_reducescatter_async([ones(3).bool()], op=hvd.Max),
    ),
    "alltoall of a scalar": (
        ValueError,
        "dimension",
        lambda: hvd.alltoall_async(torch.tensor(1.0)),
    ),
    "unregistered process set": (
        ValueError,
        "not registered",
        lambda: hvd.allreduce(ones(2), process_set=hvd.ProcessSet([0, 1])),
    ),
    "adasum in a process set": (
        NotImplementedError,
        "global",
        lambda: hvd.allreduce(ones(2), op=hvd.Adasum, process_set=hvd.ProcessSet([0, 1])),
    ),
    "parameters from a generator": (
        ValueError,
        "generator",
        lambda: hvd.broadcast_parameters((p for p in [ones(1)]), 0),
    ),
    "parameters that are no tensors": (
        ValueError,
        "int",
        lambda: hvd.broadcast_parameters({"a": ones(1), "b": 3}, 0),
    ),
    "dense tensor as sparse": (
        ValueError,
        "sparse",
        lambda: hvd.sparse_allreduce_async(ones(2), "s", hvd.Sum),
    ),
}


def _refused(case: str, only: int | None) -> bool:
    error, pattern, call = LOCAL[case]
    if only is None or hvd.rank() == only:
        for _ in range(2):
            with pytest.raises(error, match=pattern):
                call()
    return _works()


@pytest.mark.parametrize("case", sorted(LOCAL))
def test_local_errors_on_all_ranks(pool3: RankPool, case: str):
    assert pool3.run(_refused, case, None) == [True] * SIZE


# What upstream's engine finds out, and raises as a RuntimeError (spec 2.13).
FOUND_BY_THE_ENGINE = [
    "adasum of integers",
    "adasum in a process set",
    "allgather of a scalar",
    "alltoall of a scalar",
    "average of bool",
    "group on two devices",
    "grouped reducescatter of bool with Max",
    "reducescatter of integers with Adasum",
    "reducescatter with Adasum",
    "reducescatter with Min",
    "scaled bool",
]


def _runtime_errors() -> list[str]:
    wrong = []
    for case in FOUND_BY_THE_ENGINE:
        try:
            LOCAL[case][2]()
        except RuntimeError:
            continue
        wrong.append(case)
    return wrong


def test_what_upstreams_engine_finds_can_be_caught_as_a_runtime_error(pool3: RankPool):
    assert pool3.run(_runtime_errors) == [[]] * SIZE


@pytest.mark.parametrize("case", sorted(LOCAL))
def test_local_errors_on_one_rank_leave_nothing_behind(pool3: RankPool, case: str):
    assert pool3.run(_refused, case, 1) == [True] * SIZE


# Ranks contradict each other: an error on every one of them.
MISMATCH: dict[str, Callable[[], Any]] = {
    "shape": lambda: hvd.allreduce(ones(_rank_dependent(2, 3)), name="e"),
    "number of dimensions": lambda: hvd.allreduce(ones(*_rank_dependent((4,), (2, 2))), name="e"),
    "type": lambda: hvd.allreduce(
        ones(2, dtype=_rank_dependent(torch.float32, torch.float64)), name="e"
    ),
    "reduce op": lambda: hvd.allreduce(ones(2), name="e", op=_rank_dependent(hvd.Sum, hvd.Max)),
    "average and sum": lambda: hvd.allreduce(
        ones(2), name="e", op=_rank_dependent(hvd.Average, hvd.Sum)
    ),
    "prescale factor": lambda: hvd.allreduce_(
        ones(2), name="e", prescale_factor=_rank_dependent(1.0, 2.0)
    ),
    "postscale factor": lambda: hvd.allreduce_(
        ones(2), name="e", postscale_factor=_rank_dependent(1.0, 2.0)
    ),
    "async shape": lambda: hvd.synchronize(
        hvd.allreduce_async(ones(_rank_dependent(2, 3)), name="e")
    ),
    "shape in a group": lambda: hvd.grouped_allreduce([ones(1), ones(_rank_dependent(2, 3))]),
    "size of a group": lambda: hvd.grouped_allreduce([ones(1)] * _rank_dependent(2, 3), name="e"),
    "rows of allgather": lambda: hvd.allgather(ones(2, _rank_dependent(2, 3)), name="e"),
    "dimensions of allgather": lambda: hvd.allgather(
        ones(*_rank_dependent((2,), (2, 1))), name="e"
    ),
    "type of allgather": lambda: hvd.allgather(
        ones(2, dtype=_rank_dependent(torch.int32, torch.int64)), name="e"
    ),
    "root": lambda: hvd.broadcast(ones(2), _rank_dependent(0, 1), name="e"),
    "shape of broadcast": lambda: hvd.broadcast(ones(_rank_dependent(2, 3)), 0, name="e"),
    "type of broadcast": lambda: hvd.broadcast_(
        ones(2, dtype=_rank_dependent(torch.int32, torch.int64)), 0, name="e"
    ),
    "rows of alltoall": lambda: hvd.alltoall(ones(SIZE, _rank_dependent(2, 3)), name="e"),
    "type of alltoall": lambda: hvd.alltoall(
        ones(SIZE, dtype=_rank_dependent(torch.int32, torch.int64)), [1] * SIZE, name="e"
    ),
    "shape of reducescatter": lambda: hvd.reducescatter(ones(_rank_dependent(3, 4)), name="e"),
    "op of reducescatter": lambda: hvd.reducescatter(
        ones(3), name="e", op=_rank_dependent(hvd.Sum, hvd.Average)
    ),
    "factors of reducescatter": lambda: hvd.reducescatter(
        ones(3), name="e", prescale_factor=_rank_dependent(1.0, 0.5)
    ),
    "kind of operation": lambda: _rank_dependent(hvd.allreduce, hvd.allgather)(ones(2), name="e"),
}


def _mismatched(case: str) -> tuple[bool, str]:
    with pytest.raises(HIE) as raised:
        MISMATCH[case]()
    return _works(), str(raised.value)


@pytest.mark.parametrize("case", sorted(MISMATCH))
def test_contradictions_raise_on_every_rank(pool3: RankPool, case: str):
    for works, message in pool3.run(_mismatched, case):
        assert works
        assert "mismatched" in message
        assert "test_errors.py" in message  # whose line it was


DUPLICATES = {
    "allreduce": lambda name: hvd.allreduce_async(ones(2), name=name),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce_async([ones(2)], name=name),
    "allgather": lambda name: hvd.allgather_async(ones(2), name=name),
    "broadcast": lambda name: hvd.broadcast_async(ones(2), 0, name=name),
    "alltoall": lambda name: hvd.alltoall_async(ones(SIZE), name=name),
    "reducescatter": lambda name: hvd.reducescatter_async(ones(SIZE), name=name),
}


def _duplicate(kind: str) -> bool:
    submit = DUPLICATES[kind]
    if hvd.rank() == 0:
        handle = submit("twice")
        with pytest.raises(ValueError, match="twice"):
            submit("twice")
    hvd.barrier()
    if hvd.rank() != 0:
        handle = submit("twice")
    hvd.synchronize(handle)
    hvd.synchronize(submit("twice"))  # the name is free again
    return _works()


@pytest.mark.parametrize("kind", sorted(DUPLICATES))
def test_a_name_in_flight_is_refused_and_its_first_use_completes(pool3: RankPool, kind: str):
    assert pool3.run(_duplicate, kind) == [True] * SIZE


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hvd.allreduce(ones(2)),
    "allreduce_": lambda: hvd.allreduce_(ones(2)),
    "allreduce_async": lambda: hvd.allreduce_async(ones(2)),
    "grouped_allreduce_async_": lambda: hvd.grouped_allreduce_async_([ones(2)]),
    "allgather": lambda: hvd.allgather(ones(2)),
    "grouped_allgather": lambda: hvd.grouped_allgather([ones(2)]),
    "broadcast": lambda: hvd.broadcast(ones(2), 0),
    "broadcast_": lambda: hvd.broadcast_(ones(2), 0),
    "alltoall": lambda: hvd.alltoall(ones(2)),
    "reducescatter": lambda: hvd.reducescatter(ones(2)),
    "barrier": lambda: hvd.barrier(),
    "join": lambda: hvd.join(),
}


def _outside_init(rank: int, size: int) -> list[str]:
    seen = []
    for name, call in COLLECTIVES.items():
        for _ in range(2):
            with pytest.raises(HIE, match="not initialised"):
                call()
        seen.append(name)
    hvd.init()
    assert float(hvd.allreduce(ones(1), op=hvd.Sum)) == size
    hvd.shutdown()
    for call in COLLECTIVES.values():
        with pytest.raises(HIE):
            call()
    return seen


def test_collectives_outside_init_and_shutdown():
    assert run_ranks(_outside_init, 2) == [list(COLLECTIVES)] * 2
