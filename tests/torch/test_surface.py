"""The public surface: names, argument order and defaults of Horovod 0.28.1, written out."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import horovod.torch as hvd
from horovod.common import process_sets, util
from horovod.torch import compression, functions, mpi_ops
from horovod.torch.optimizers.options import TorchOptions
from tests.bindings.options import not_in

_REDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0"
_REDUCE_COMPRESSED = (
    "average=None, name=None, compression=NoneCompressor, op=None, "
    "prescale_factor=1.0, postscale_factor=1.0"
)
_SCALE = "prescale_factor=1.0, postscale_factor=1.0"

SIGNATURES = {
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=NoneCompressor, "
        "backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, "
        "num_groups=0, groups=None, sparse_as_dense=False, process_set=GPS, "
        "shard_state=False, communication_hook=None, overlap_forward=None, local_steps=None, "
        "outer=None, warmup_steps=0, average_state=False, average_buffers=None, fragments=1, "
        "delay=0, alpha=None, within=None"
    ),
    "SyncBatchNorm": (
        "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, "
        "process_set=GPS"
    ),
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "size": "",
    "rank": "",
    "local_size": "",
    "local_rank": "",
    "cross_size": "",
    "cross_rank": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stats": "",
    "stop_timeline": "",
    "allreduce": f"tensor, {_REDUCE_COMPRESSED}, process_set=GPS",
    "allreduce_async": f"tensor, {_REDUCE}, process_set=GPS",
    "allreduce_": f"tensor, {_REDUCE}, process_set=GPS",
    "allreduce_async_": f"tensor, {_REDUCE}, process_set=GPS",
    "grouped_allreduce": f"tensors, {_REDUCE_COMPRESSED}, process_set=GPS",
    "grouped_allreduce_async": f"tensors, {_REDUCE}, process_set=GPS",
    "grouped_allreduce_": f"tensors, {_REDUCE}, process_set=GPS",
    "grouped_allreduce_async_": f"tensors, {_REDUCE}, process_set=GPS",
    "sparse_allreduce_async": "tensor, name, op, process_set=GPS",
    "allgather": "tensor, name=None, process_set=GPS",
    "allgather_async": "tensor, name=None, process_set=GPS",
    "grouped_allgather": "tensors, name=None, process_set=GPS",
    "grouped_allgather_async": "tensors, name=None, process_set=GPS",
    "broadcast": "tensor, root_rank, name=None, process_set=GPS",
    "broadcast_async": "tensor, root_rank, name=None, process_set=GPS",
    "broadcast_": "tensor, root_rank, name=None, process_set=GPS",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=GPS",
    "alltoall": "tensor, splits=None, name=None, process_set=GPS",
    "alltoall_async": "tensor, splits=None, name=None, process_set=GPS",
    "reducescatter": (
        f"tensor, name=None, compression=NoneCompressor, op=0, process_set=GPS, {_SCALE}"
    ),
    "reducescatter_async": f"tensor, name=None, op=0, process_set=GPS, {_SCALE}",
    "grouped_reducescatter": (
        f"tensors, name=None, compression=NoneCompressor, op=0, process_set=GPS, {_SCALE}"
    ),
    "grouped_reducescatter_async": f"tensors, name=None, op=0, process_set=GPS, {_SCALE}",
    "join": "device=-1",
    "barrier": "process_set=GPS",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=GPS",
    "allgather_object": "obj, name=None, process_set=GPS",  # upstream: the world only
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}
OTHER_NAMES = {
    "OuterSGD",
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "global_process_set",
}


def _signature(function: object) -> str:
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        default = parameter.default
        if default is parameter.empty:
            parts.append(parameter.name)
        elif default is hvd.global_process_set:
            parts.append(f"{parameter.name}=GPS")
        elif isinstance(default, type):
            parts.append(f"{parameter.name}={default.__name__}")
        elif isinstance(default, int) and not isinstance(default, bool):
            parts.append(f"{parameter.name}={int(default)}")
        else:
            parts.append(f"{parameter.name}={default!r}")
    return ", ".join(parts)


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature(name: str):
    assert _signature(getattr(hvd, name)) == SIGNATURES[name]


def test_the_exported_names_are_these():
    assert set(hvd.__all__) == set(SIGNATURES) | OTHER_NAMES
    public = {
        name
        for name, value in vars(hvd).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public == set(hvd.__all__)


def test_where_scripts_import_them_from():
    helpers = {
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "broadcast_object",
        "allgather_object",
    }
    sets = {"ProcessSet", "add_process_set", "remove_process_set", "global_process_set"}
    others = helpers | sets | {"DistributedOptimizer", "SyncBatchNorm"}
    for name in set(SIGNATURES) - others | {"is_homogeneous"}:
        assert callable(getattr(mpi_ops, name)), name
    for name in helpers:
        assert getattr(functions, name) is getattr(hvd, name)
    for name in sets:
        assert getattr(process_sets, name) is getattr(hvd, name)
    for name in ("Compression", "Compressor", "NoneCompressor", "FP16Compressor", "BF16Compressor"):
        assert isinstance(getattr(compression, name), type)


def test_autograd_functions():
    for operation in ("Allreduce", "Allgather", "Broadcast", "Alltoall", "Reducescatter"):
        assert callable(getattr(mpi_ops, f"Horovod{operation}").apply)
    for operation in ("Allreduce", "Allgather", "Reducescatter"):
        assert callable(getattr(mpi_ops, f"HorovodGrouped{operation}").apply)


def test_reduce_operators_have_upstreams_values():
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert [int(op) for op in ops] == [0, 1, 2, 3, 4, 5]
    basics = mpi_ops._basics
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    assert [getattr(basics, name) for name in names] == ops


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("extension_available", "ext_base_name, verbose=False"),
        ("gpu_available", "ext_base_name, verbose=False"),
        ("mpi_built", "verbose=False"),
        ("gloo_built", "verbose=False"),
        ("nccl_built", "verbose=False"),
        ("ddl_built", "verbose=False"),
        ("ccl_built", "verbose=False"),
        ("split_list", "items, num_parts"),
        ("num_rank_is_power_2", "num_rank"),
        ("check_num_rank_power_of_2", "num_rank"),
    ],
)
def test_helpers(name: str, signature: str):
    assert _signature(getattr(util, name)) == signature


def test_the_record_of_options_has_all_arguments():
    assert not_in(TorchOptions, hvd.DistributedOptimizer) == {"optimizer"}


def test_importing_the_binding_imports_nothing_heavy():
    program = (
        "import sys, horovod.torch\n"
        "heavy = {'cloudpickle', 'mpi4py', 'psutil', 'yaml', 'horovod.runner'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.strip() == "[]", done.stderr
