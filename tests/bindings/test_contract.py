"""What every binding does alike: basics, collectives, errors, process sets and join.

A new binding is added to `frameworks.FRAMEWORKS` and has to pass all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.bindings.frameworks import Framework
from tests.ranks import RankPool

BASICS = [
    *("init", "shutdown", "is_initialized", "size", "rank"),
    *("local_size", "local_rank", "cross_size", "cross_rank"),
    *("mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled", "nccl_built", "cuda_built"),
    *("ddl_built", "ccl_built", "rocm_built", "mpi_threads_supported"),
    *("start_timeline", "stop_timeline", "stats"),
    *("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    *("Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression"),
    *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast"),
    *("alltoall", "reducescatter", "grouped_reducescatter"),
    *("broadcast_object", "allgather_object"),
]


def check(pool: RankPool, framework: Framework, function: Callable[..., Any]) -> list[Any]:
    return pool.run(function, framework, timeout=240)


def _basics(framework: Framework) -> list[Any]:
    hvd = framework.hvd
    missing = [name for name in BASICS if not hasattr(hvd, name)]
    assert not missing, missing
    hvd.init()  # again, which does nothing
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="not initialised"):
        hvd.size()
    with pytest.raises(Exception, match="not initialised") as error:
        framework.values(hvd.allreduce(framework.array([1.0])))
    assert isinstance(error.value, framework.error("mismatch"))
    hvd.init()
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()
    assert isinstance(hvd.nccl_built(), int)
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()]


def test_basics(shared_ranks: RankPool, framework: Framework):
    assert check(shared_ranks, framework, _basics) == [[0, 2, 0, 2, 1], [1, 2, 1, 2, 1]]


def _stats(framework: Framework) -> list[Any]:
    hvd = framework.hvd
    hvd.shutdown()
    for call in (hvd.stats, lambda: hvd.stats.log(loss=0.5)):
        with pytest.raises(ValueError, match="not initialised"):
            call()
    hvd.init()
    first = hvd.stats()
    hvd.allreduce(framework.array([1.0] * 100))
    hvd.allgather(framework.array([[1, 2]], "int32"))
    hvd.stats.log(loss=framework.array([0.5]), accuracy=1)
    hvd.stats.log({"val/acc": framework.array([float("nan")])}, step=12)
    for wrong, message in (
        ({"loss": "low"}, "must be a number or a tensor of one element, not str"),
        ({"loss": framework.array([1.0, 2.0])}, "loss"),
        ({"x" * 201: 1.0}, "200 characters"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.stats.log(wrong)
    second = hvd.stats()
    changed = ("operations", "bytes_reduced", "bytes_shared_memory")
    assert (second["rank"], second["size"]) == (hvd.rank(), hvd.size())
    return [first["steps"], *(second[key] - first[key] for key in changed), second["steps"]]


def test_stats(shared_ranks: RankPool, framework: Framework):
    assert check(shared_ranks, framework, _stats) == [[0, 2, 400, 408, 0]] * 2


def _reductions(framework: Framework) -> list[Any]:
    hvd, rank = framework.hvd, framework.hvd.rank()
    mine = framework.array([1.0 + rank, 4.0])
    whole = framework.array([3 * rank + 2], "int32")
    found = [
        hvd.allreduce(mine),
        *(hvd.allreduce(mine, op=op) for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product)),
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        hvd.allreduce(whole),  # 7 / 2, truncated
        hvd.allreduce(framework.array(1.0 + rank), op=hvd.Sum),
        *hvd.grouped_allreduce([mine, whole], op=hvd.Sum),
        hvd.reducescatter(framework.array([[1.0], [2.0], [3.0]]), op=hvd.Sum),
        *hvd.grouped_reducescatter([mine, mine], op=hvd.Sum),
    ]
    return [framework.values(each) for each in found]


def test_reductions(shared_ranks: RankPool, framework: Framework):
    common = [
        [1.5, 4.0],
        *([3.0, 8.0], [1.0, 4.0], [2.0, 4.0], [2.0, 16.0]),
        [6.0, 16.0],
        [3],
        [3.0],
        *([3.0, 8.0], [7]),
    ]
    first, second = check(shared_ranks, framework, _reductions)
    assert first == [*common, [[2.0], [4.0]], [3.0], [3.0]]
    assert second == [*common, [[6.0]], [8.0], [8.0]]


def _movements(framework: Framework) -> list[Any]:
    hvd, rank = framework.hvd, framework.hvd.rank()
    rows = framework.array([[rank, 10 * rank]] * (rank + 1), "int32")
    sent, received = hvd.alltoall(
        framework.array([0.0, 1.0, 2.0]), splits=framework.array([1, 2], "int32")
    )
    found = [
        hvd.allgather(rows),
        *hvd.grouped_allgather([rows, framework.array([rank])]),
        hvd.broadcast(framework.array([rank, 5.0]), root_rank=1),
        hvd.alltoall(framework.array([1.0 + rank, 3.0 + rank])),
        sent,
        received,
    ]
    objects = [
        hvd.broadcast_object({"from": rank}, root_rank=1),
        hvd.allgather_object("x" * rank),
    ]
    return [*(framework.values(each) for each in found), objects]


def test_movements(shared_ranks: RankPool, framework: Framework):
    gathered = [[0, 0], [1, 10], [1, 10]]
    for rank, found in enumerate(check(shared_ranks, framework, _movements)):
        assert found == [
            gathered,
            *(gathered, [0.0, 1.0]),
            [1.0, 5.0],
            [[1.0, 2.0], [3.0, 4.0]][rank],
            [[0.0, 0.0], [1.0, 2.0, 1.0, 2.0]][rank],
            [[1, 1], [2, 2]][rank],
            [{"from": 1}, ["", "x"]],
        ]


def _compression(framework: Framework) -> list[Any]:
    hvd = framework.hvd
    array = framework.array([1.0 + 2**-13, 3.0])
    found = []
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        sent, context = compression.compress(array)
        reduced = hvd.allreduce(sent, op=hvd.Sum)
        found.append(framework.values(compression.decompress(reduced, context)))
    return found


def test_compression(shared_ranks: RankPool, framework: Framework):
    exact, rounded = check(shared_ranks, framework, _compression)[0]
    assert exact == [2 + 2**-12, 6.0]
    assert rounded == [2.0, 6.0]


def _mismatches(framework: Framework) -> list[str]:
    hvd, rank = framework.hvd, framework.hvd.rank()
    messages = []
    for call in (
        lambda: hvd.allreduce(framework.array([1.0] * (2 + rank)), name="shapes"),
        lambda: hvd.allreduce(
            framework.array([1], "int32" if rank else "float32"), name="types", op=hvd.Sum
        ),
        lambda: hvd.broadcast(framework.array([1.0]), root_rank=rank, name="roots"),
        lambda: hvd.allgather(framework.array([[1.0] * (1 + rank)]), name="rows"),
    ):
        with pytest.raises(framework.error("mismatch")) as error:
            framework.values(call())
        messages.append(str(error.value))
    hvd.broadcast_object("still usable")
    return messages


def test_what_ranks_do_not_agree_on_fails_on_all_of_them(
    shared_ranks: RankPool, framework: Framework
):
    for messages in check(shared_ranks, framework, _mismatches):
        for message, word in zip(messages, ["shape", "dtype", "root rank", "shape"], strict=True):
            assert f"mismatched {word} between ranks" in message
            assert "on rank 0" in message
            assert "on rank 1" in message


def _wrong_arguments(framework: Framework) -> None:
    hvd = framework.hvd
    one = framework.array([1.0])
    for call, message in (
        (lambda: hvd.broadcast(one, root_rank=9), "root rank 9 is not in the process set"),
        (lambda: hvd.alltoall(framework.array([1.0] * 3)), "divisible by 2"),
        (
            lambda: hvd.alltoall(one, splits=framework.array([1, 1], "int32")),
            "sum up to 2, but there are 1 rows",
        ),
    ):
        with pytest.raises(framework.error("invalid"), match=message):
            framework.values(call())
    with pytest.raises(Exception, match="is not registered"):
        hvd.allreduce(one, process_set=hvd.ProcessSet([0]))
    hvd.broadcast_object("nothing was left behind")


def test_wrong_arguments_fail_before_anything_is_sent(shared_ranks: RankPool, framework: Framework):
    check(shared_ranks, framework, _wrong_arguments)


def _process_sets(framework: Framework) -> list[Any]:
    hvd, rank = framework.hvd, framework.hvd.rank()
    only = hvd.add_process_set([1])
    try:
        assert only.included() == (rank == 1)
        assert only.size() == 1
        with pytest.raises(ValueError, match="process set"):
            hvd.add_process_set([1])
        if rank == 1:
            found = framework.values(hvd.allreduce(framework.array([5.0]), process_set=only))
            gathered = framework.values(hvd.allgather(framework.array([6.0]), process_set=only))
        else:
            with pytest.raises(framework.error("invalid"), match="does not belong to process set"):
                framework.values(hvd.allreduce(framework.array([5.0]), process_set=only))
            found = gathered = None
        together = framework.values(hvd.allreduce(framework.array([1.0]), op=hvd.Sum))
    finally:
        removed = hvd.remove_process_set(only)
    assert removed
    assert only.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    return [found, gathered, together]


def test_process_sets(shared_ranks: RankPool, framework: Framework):
    assert check(shared_ranks, framework, _process_sets) == [
        [None, None, [2.0]],
        [[5.0], [6.0], [2.0]],
    ]


def _join(framework: Framework) -> list[Any]:
    hvd, rank = framework.hvd, framework.hvd.rank()
    found = []
    for number in range(1 + rank):
        reduced = hvd.allreduce(framework.array([4.0]), name=f"uneven.{number}")
        found.append(framework.values(reduced))
    last = int(hvd.join())
    return [found, last, hvd.allgather_object(rank)]


def test_join(shared_ranks: RankPool, framework: Framework):
    if "join" in framework.missing:
        pytest.skip(f"horovod.{framework.name} has no join, as upstream")
    assert check(shared_ranks, framework, _join) == [
        [[[4.0]], 1, [0, 1]],
        [[[4.0], [2.0]], 1, [0, 1]],
    ]
