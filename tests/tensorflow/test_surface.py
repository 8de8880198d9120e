"""The public surface: names, argument order and defaults of Horovod 0.28.1, written out."""

from __future__ import annotations

import inspect

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common import process_sets
from horovod.common.optimizer_options import OptimizerOptions
from horovod.tensorflow import compression, functions, mpi_ops, util
from tests.bindings.options import not_in

_SCALE = "prescale_factor=1.0, postscale_factor=1.0"
_REDUCE = (
    "average=None, device_dense='', device_sparse='', compression=NoneCompressor, op=None, "
    f"{_SCALE}"
)
_TAPE = (
    "gradtape, device_dense='', device_sparse='', compression=NoneCompressor, "
    "sparse_as_dense=False, op=0, gradient_predivide_factor=1.0, num_groups=0, groups=None, "
    "process_set=GPS"
)

BASICS = {
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    **dict.fromkeys(
        [
            *("shutdown", "is_initialized", "stop_timeline", "is_homogeneous", "stats"),
            *("size", "rank", "local_size", "local_rank", "cross_size", "cross_rank"),
            *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
            *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
        ],
        "",
    ),
}
COLLECTIVES = {
    "allreduce": f"tensor, {_REDUCE}, name=None, process_set=GPS, ignore_name_scope=False",
    "grouped_allreduce": (
        f"tensors, {_REDUCE}, process_set=GPS, ignore_name_scope=False, name=None"
    ),
    "allgather": "tensor, name=None, ignore_name_scope=False, process_set=GPS",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set=GPS",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set=GPS",
    "broadcast_": "variables, root_rank, name=None, process_set=GPS",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set=GPS",
    "reducescatter": (
        "tensor, device_dense='', compression=NoneCompressor, op=0, name=None, process_set=GPS, "
        f"ignore_name_scope=False, {_SCALE}"
    ),
    "grouped_reducescatter": (
        f"tensors, device_dense='', compression=NoneCompressor, op=0, process_set=GPS, {_SCALE}"
    ),
    "join": "",
    "size_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "process_set_included_op": "process_set_id=0, name=None",
}
FUNCTIONS = {
    "broadcast_variables": "variables, root_rank, process_set=GPS, inplace=False",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, process_set=GPS",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=GPS",
    "allgather_object": "obj, session=None, name=None, process_set=GPS",
}
TRAINING = {
    "DistributedOptimizer": (
        "optimizer, name=None, use_locking=False, device_dense='', device_sparse='', "
        "compression=NoneCompressor, sparse_as_dense=False, backward_passes_per_step=1, op=0, "
        "gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, "
        "groups=None, process_set=GPS, scale_local_gradients=True"
    ),
    "DistributedGradientTape": f"{_TAPE}, scale_local_gradients=True",
    "PartialDistributedGradientTape": f"{_TAPE}, local_layers=None, scale_local_gradients=True",
    "LocalGradientAggregationHelper": (
        "backward_passes_per_step, allreduce_func, sparse_as_dense, "
        "average_aggregated_gradients, rank, optimizer_type, process_set=GPS, "
        "scale_local_gradients=True, name=''"
    ),
}
HELPERS = {
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "check_num_rank_power_of_2": "num_rank",
    "handle_average_backwards_compatibility": "op, average",
    "vars_to_refs": "variables",
    "refs_to_vars": "refs",
    "gpu_available": "ext_base_name, verbose=False",
    "split_list": "items, num_parts",
}
SIGNATURES = BASICS | COLLECTIVES | FUNCTIONS | TRAINING | HELPERS
OTHER_NAMES = {
    *("Average", "Sum", "Adasum", "Min", "Max", "Product"),
    *("Compression", "ProcessSet", "global_process_set", "check_extension"),
    "SyncBatchNormalization",
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
    assert public | {"SyncBatchNormalization"} == set(hvd.__all__)


def test_where_scripts_import_them_from():
    for name in BASICS | COLLECTIVES:
        assert getattr(mpi_ops, name) == getattr(hvd, name)
    for name in FUNCTIONS:
        assert getattr(functions, name) is getattr(hvd, name)
    for name in ("ProcessSet", "add_process_set", "remove_process_set", "global_process_set"):
        assert getattr(process_sets, name) is getattr(hvd, name)
    for name in ("Compression", "Compressor", "NoneCompressor", "FP16Compressor", "BF16Compressor"):
        assert isinstance(getattr(compression, name), type)


def test_reduce_operators_have_upstreams_values():
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert [int(op) for op in ops] == [0, 1, 2, 3, 4, 5]


def test_a_compressor_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="compress"):
        compression.Compressor.compress(None)
    with pytest.raises(NotImplementedError, match="decompress"):
        compression.Compressor.decompress(None, None)


def test_references_to_variables():
    class Variable:
        """Has what tf.Variable and Keras variables have."""

        def ref(self) -> Reference:
            return Reference(self)

    class Reference:
        def __init__(self, variable: Variable) -> None:
            self.variable = variable

        def deref(self) -> Variable:
            return self.variable

    one, two, three = Variable(), Variable(), Variable()
    refs = hvd.vars_to_refs([one, [two, (three,)]])
    assert isinstance(refs, tuple)
    assert isinstance(refs[1], tuple)
    assert hvd.refs_to_vars(refs) == [one, [two, [three]]]
    assert hvd.refs_to_vars(hvd.vars_to_refs(one)) is one


def test_upstreams_other_helpers():
    assert hvd.split_list(list(range(5)), 2) == [[0, 1, 2], [3, 4]]
    assert hvd.handle_average_backwards_compatibility(hvd.Sum, None) is hvd.Sum
    assert hvd.gpu_available("tensorflow") == bool(tf.config.list_physical_devices("GPU"))
    assert hvd.gpu_available("mxnet") is False
    assert util.split_list is hvd.split_list
    hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    with pytest.raises(ImportError, match="nosuch"):
        hvd.check_extension("horovod.nosuch", "HOROVOD_WITH_NOSUCH", __file__)
    with pytest.raises(ValueError, match="power of two"):
        hvd.check_num_rank_power_of_2(3)


def test_the_record_of_options_has_all_arguments():
    for function, others in {
        hvd.DistributedOptimizer: {"optimizer", "use_locking"},
        hvd.DistributedGradientTape: {"gradtape"},
        hvd.PartialDistributedGradientTape: {"gradtape", "local_layers"},
    }.items():
        assert not_in(OptimizerOptions, function) == others
