"""The public names of `horovod.tensorflow.keras` and `horovod.keras`, and how they are called."""

from __future__ import annotations

import inspect
from typing import Any

from horovod.common.optimizer_options import OptimizerOptions
from tests.bindings.options import not_in
from tests.keras.flavours import front_end
from tests.ranks import RankPool

COMMON = """
    init shutdown is_initialized start_timeline stop_timeline stats size local_size cross_size rank
    local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
    nccl_built ddl_built ccl_built cuda_built rocm_built
    Average Sum Compression callbacks elastic DistributedOptimizer broadcast_global_variables
    allreduce allgather broadcast reducescatter load_model global_process_set
    PartialDistributedOptimizer
"""
NAMES = {
    "horovod.tensorflow.keras": f"{COMMON} ProcessSet add_process_set remove_process_set",
    "horovod.keras": f"{COMMON} Adasum",
}
VALUES = {
    "allreduce": "value name average prescale_factor postscale_factor op compression",
    "allgather": "value name",
    "broadcast": "value root_rank name",
    "reducescatter": "value name op",
    "broadcast_global_variables": "root_rank",
    "PartialDistributedOptimizer": (
        "optimizer name device_dense device_sparse compression sparse_as_dense "
        "gradient_predivide_factor op backward_passes_per_step average_aggregated_gradients "
        "groups process_set local_layers scale_local_gradients"
    ),
}
FIRST = (
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op"
)
SIGNATURES = {
    "horovod.tensorflow.keras": {
        **VALUES,
        "DistributedOptimizer": f"{FIRST} backward_passes_per_step average_aggregated_gradients "
        "num_groups groups process_set scale_local_gradients",
        "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
    },
    "horovod.keras": {
        **VALUES,
        "DistributedOptimizer": f"{FIRST} num_groups groups",  # ours takes more behind them
        "load_model": "filepath custom_optimizers custom_objects compression",
    },
}
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "MetricAverageCallback": "device",
    "LearningRateScheduleCallback": (
        "initial_lr multiplier start_epoch end_epoch staircase momentum_correction steps_per_epoch"
    ),
    "LearningRateWarmupCallback": (
        "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose"
    ),
    "BestModelCheckpoint": "monitor verbose",
}


def _surface() -> tuple[str, list[str], dict[str, str], bool]:
    keras, hvd = front_end()
    functions: dict[str, Any] = {
        **{name: getattr(hvd, name) for name in SIGNATURES[hvd.__name__]},
        **{name: getattr(hvd.callbacks, name) for name in CALLBACKS},
    }
    signatures = {name: " ".join(inspect.signature(f).parameters) for name, f in functions.items()}
    are_callbacks = all(
        issubclass(getattr(hvd.callbacks, name), keras.callbacks.Callback) for name in CALLBACKS
    )
    missing = [name for name in NAMES[hvd.__name__].split() if not hasattr(hvd, name)]
    missing += [name for name in hvd.__all__ if not hasattr(hvd, name)]
    return hvd.__name__, missing, signatures, are_callbacks


def test_names_and_signatures(keras_pool: RankPool):
    module, missing, signatures, are_callbacks = keras_pool.run(_surface)[0]
    assert not missing
    assert are_callbacks
    for name, wanted in {**SIGNATURES[module], **CALLBACKS}.items():
        assert signatures[name].startswith(wanted), name
    only_weights = "save_weights_only" in signatures["BestModelCheckpoint"]
    assert only_weights == (module == "horovod.tensorflow.keras")


def _left_out() -> list[set[str]]:
    _, hvd = front_end()
    functions = (hvd.DistributedOptimizer, hvd.PartialDistributedOptimizer)
    return [not_in(OptimizerOptions, function) for function in functions]


def test_the_record_of_options_has_all_arguments(keras_pool: RankPool):
    assert keras_pool.run(_left_out)[0] == [{"optimizer"}, {"optimizer", "local_layers"}]
