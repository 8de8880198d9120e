"""Starting, stopping, who am I and what is available."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common import util
from horovod.torch import mpi_ops
from tests.ranks import RankPool, run_ranks

QUESTIONS = ["size", "rank", "local_size", "local_rank", "cross_size", "cross_rank"]


def _place() -> list[int]:
    return [getattr(hvd, question)() for question in QUESTIONS]


def test_who_am_i(pool3: RankPool):
    assert pool3.run(_place) == [[3, rank, 3, rank, 1, 0] for rank in range(3)]


def _homogeneous() -> bool:
    return mpi_ops.is_homogeneous()


def test_one_host_is_homogeneous(pool2: RankPool):
    assert pool2.run(_homogeneous) == [True, True]


def _life(rank: int, size: int) -> list[Any]:
    seen: list[Any] = [hvd.is_initialized(), hvd.shutdown()]
    for question in [*QUESTIONS, "stop_timeline", "mpi_threads_supported"]:
        with pytest.raises(ValueError, match="not initialised"):
            getattr(hvd, question)()
    with pytest.raises(ValueError, match="not initialised"):
        mpi_ops.is_homogeneous()
    with pytest.raises(ValueError, match="not initialised"):
        hvd.start_timeline("/nowhere/timeline.json")
    for _ in range(3):
        hvd.init()
        hvd.init()
        seen.append((hvd.is_initialized(), _place()))
        assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == size
        hvd.shutdown()
        hvd.shutdown()
    seen.append(hvd.is_initialized())
    return seen


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


ENTRIES = {
    "DistributedOptimizer": lambda: hvd.DistributedOptimizer(_optimizer()),
    "with Adasum": lambda: hvd.DistributedOptimizer(_optimizer(), op=hvd.Adasum),
    "of a process set": lambda: hvd.DistributedOptimizer(
        _optimizer(), process_set=hvd.ProcessSet([0])
    ),
    "SyncBatchNorm": lambda: hvd.SyncBatchNorm(2)(torch.ones(4, 2)),
    "allreduce": lambda: hvd.allreduce(torch.ones(2)),
    "of a set": lambda: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0])),
    "grouped_allreduce_async_": lambda: hvd.grouped_allreduce_async_([torch.ones(2)]),
    "sparse_allreduce_async": lambda: hvd.sparse_allreduce_async(
        torch.ones(2).to_sparse(), "sparse", hvd.Sum
    ),
    "allgather": lambda: hvd.allgather(torch.ones(2)),
    "alltoall": lambda: hvd.alltoall(torch.ones(2)),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(2)),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 0),
    "broadcast_parameters": lambda: hvd.broadcast_parameters({"a": torch.ones(2)}, 0),
    "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(_optimizer(), 0),
    "broadcast_object": lambda: hvd.broadcast_object(1),
    "allgather_object": lambda: hvd.allgather_object(1),
    "barrier": hvd.barrier,
    "join": hvd.join,
    "add_process_set": lambda: hvd.add_process_set([0]),
    "ElasticSampler": lambda: hvd.elastic.ElasticSampler([1, 2]),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_before_init_every_entry_says_what_is_missing(entry: str):
    with pytest.raises((ValueError, hvd.HorovodInternalError), match=r"call hvd\.init\(\) first"):
        ENTRIES[entry]()


def test_init_and_shutdown_again_and_again():
    for rank, seen in enumerate(run_ranks(_life, 2)):
        assert seen == [False, None, *[(True, [2, rank, 2, rank, 1, 0])] * 3, False]


def _without_launcher(rank: int, size: int) -> list[int]:
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "_HOROVOD_")):
            del os.environ[name]
    hvd.init()
    return _place()


def test_no_launcher_means_one_process():
    assert run_ranks(_without_launcher, 1) == [[1, 0, 1, 0, 1, 0]]


def _bad_arguments(rank: int, size: int) -> bool:
    with pytest.raises(ValueError, match="comm"):
        hvd.init(comm=3)
    with pytest.raises(ValueError, match="dynamic"):
        hvd.init(process_sets="static")
    assert not hvd.is_initialized()
    hvd.init(comm=[])
    return hvd.is_initialized()


def test_bad_arguments_of_init():
    assert run_ranks(_bad_arguments, 1) == [True]


def _chosen_ranks(rank: int, size: int) -> list[int] | str:
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1"):
            hvd.init(comm=[0, 2])
        return "left out"
    hvd.init(comm=[0, 2])
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 2.0
    return _place()


def test_init_with_some_of_the_ranks():
    assert run_ranks(_chosen_ranks, 3) == [[2, 0, 2, 0, 1, 0], "left out", [2, 1, 2, 1, 1, 0]]


def _timeline(rank: int, size: int, folder: str) -> bool:
    hvd.init()
    with pytest.raises(ValueError, match="HOROVOD_TIMELINE"):
        hvd.start_timeline(f"{folder}/timeline.json")
    return True


def test_the_timeline_must_be_enabled_at_init(tmp_path):
    assert run_ranks(_timeline, 1, str(tmp_path)) == [True]


def _capabilities() -> dict[str, Any]:
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()
    return {
        "mpi_enabled": hvd.mpi_enabled(),
        "gloo": (hvd.gloo_built(), hvd.gloo_enabled()),
        "nccl": hvd.nccl_built(),
        "cuda": hvd.cuda_built(),
        "rocm": hvd.rocm_built(),
        "others": (hvd.ddl_built(), hvd.ccl_built()),
    }


def test_capabilities_are_those_of_torch(pool2: RankPool):
    gloo = torch.distributed.is_gloo_available()
    for seen in pool2.run(_capabilities):
        assert seen == {
            "mpi_enabled": False,
            "gloo": (gloo, gloo),
            "nccl": util.nccl_built(),
            "cuda": torch.version.cuda is not None,
            "rocm": torch.version.hip is not None,
            "others": (False, False),
        }
        assert (seen["nccl"] > 20000) == torch.distributed.is_nccl_available()


def test_helpers_ask_a_child_process(capsys: pytest.CaptureFixture[str]):
    assert util.gloo_built() == torch.distributed.is_gloo_available()
    assert util.gpu_available("torch") == torch.cuda.is_available()
    assert util.extension_available("torch")
    assert not util.extension_available("fortran")
    assert capsys.readouterr().err == ""
    assert not util.extension_available("fortran", verbose=True)
    assert "horovod.fortran" in capsys.readouterr().err
    assert not util.gpu_available("fortran")


def test_mpi_is_found_where_mpi4py_works():
    pytest.importorskip("mpi4py")
    assert util.mpi_built() == hvd.mpi_built()


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 5, [1, 1]), (0, 2, []), (4, 1, [4])],
)
def test_split_list(count: int, parts: int, expected: list[int]):
    result = util.split_list(list(range(count)), parts)
    assert [len(part) for part in result] == expected
    assert [item for part in result for item in part] == list(range(count))


def test_split_list_into_no_parts():
    with pytest.raises(ValueError, match="num_parts"):
        util.split_list([1], 0)


def test_powers_of_two():
    assert [n for n in range(-2, 20) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]
    util.check_num_rank_power_of_2(8)
    with pytest.raises(ValueError, match="6"):
        util.check_num_rank_power_of_2(6)


def test_versions_are_compared_by_their_first_three_numbers():
    newer = util.is_version_greater_equal_than
    assert newer("2.4.0", "2.4.0")
    assert newer("2.4.1+cpu", "2.4.0")
    assert newer("2.10.0", "2.9.3")
    assert newer("3.0", "2.99.99")
    assert newer("2.4.0rc1", "2.4.0")
    assert not newer("2.3.99", "2.4.0")
    assert not newer("2.4", "2.4.1")
    with pytest.raises(ValueError, match=r"major\.minor\.patch"):
        newer("2.4.0", "2.4")


def test_the_older_average_flag_warns():
    with pytest.warns(DeprecationWarning, match="average"):
        assert util.resolve_reduce_op(None, False) is hvd.Sum
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert util.resolve_reduce_op(None, None) is hvd.Average
        assert util.resolve_reduce_op(3, None) is hvd.Min
