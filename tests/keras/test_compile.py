"""What `compile` is asked for: XLA, eager steps, options of old documentation, other frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.keras.flavours import front_end
from tests.keras.training import BATCH, data, fit, fit_together, share, small_model
from tests.ranks import RankPool


def _xla_by_choice() -> str:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(Exception) as caught:
        fit_together(
            keras,
            hvd,
            optimizer,
            compile_arguments={"jit_compile": True},
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        )
    return str(caught.value)


def test_xla_by_choice_is_refused_in_one_sentence(tensorflow_keras_pool: RankPool):
    for message in tensorflow_keras_pool.run(_xla_by_choice):
        assert "cannot be compiled by XLA: set jit_compile=False" in message


def _xla_by_default() -> tuple[bool, bool]:
    """What Keras does on a machine with a GPU: it chooses XLA where it was not asked."""
    keras, hvd = front_end()

    class OnGpu(keras.Sequential):
        def _resolve_auto_jit_compile(self) -> bool:
            return True

    model = OnGpu(small_model(keras).layers)
    x, y = data(1)
    x, y = share(x, hvd.rank()), share(y, hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    chosen = model.jit_compile
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    return chosen, model.jit_compile


def test_xla_by_default_is_switched_off(keras_pools: dict[str, RankPool]):
    assert keras_pools["tensorflow"].run(_xla_by_default) == [(True, False)] * 2


def _torch_compile() -> list[float]:
    import torch

    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    w = keras.Variable([1.0, 2.0])

    @torch.compile(backend="eager")
    def step(gradient: Any) -> None:
        optimizer.apply([gradient * 2.0], [w])

    step(torch.full((2,), hvd.rank() + 1.0))
    return w.numpy().tolist()


def test_torch_compile_leaves_the_exchange_out(keras_pools: dict[str, RankPool]):
    assert keras_pools["torch"].run(_torch_compile) == [[-0.5, 0.5]] * 2


def _old_option() -> None:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model = small_model(keras)
    x, y = data(1)
    fit(
        model,
        optimizer,
        share(x, hvd.rank()),
        share(y, hvd.rank()),
        BATCH,
        compile_arguments={"experimental_run_tf_function": False},
    )


def test_tf_keras_takes_the_option_of_old_scripts(keras_pools: dict[str, RankPool]):
    keras_pools["tf_keras"].run(_old_option)


SCRIPT = """
import sys
import horovod.keras as hvd
import keras
hvd.init()
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
hvd.callbacks, hvd.elastic, hvd.load_model
assert "tensorflow" not in sys.modules, "TensorFlow was imported"
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse",
              experimental_run_tf_function=False)
"""


def test_keras_3_explains_the_option_of_old_scripts():
    environ = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1
    assert "TypeError" in done.stderr
    explanation = done.stderr.splitlines()[-1]
    assert explanation.startswith("Horovod: Keras 3 has no experimental_run_tf_function")
    assert "leave it out of compile()" in explanation
