"""Collectives on single values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import flavour, front_end
from tests.keras.training import numpy, tensor
from tests.ranks import RankPool


def _values() -> dict[str, Any]:
    keras, hvd = front_end()
    me = hvd.rank() + 1
    native = tensor(keras, [me, 10.0 * me])
    results = {
        "number": hvd.allreduce(float(me)),
        "named": hvd.allreduce(float(me), name="a number"),
        "sum": hvd.allreduce(native, op=hvd.Sum),
        "scaled": hvd.allreduce(
            np.float64([me]), prescale_factor=0.5, postscale_factor=4.0, op=hvd.Sum
        ),
        "fp16": hvd.allreduce(native, compression=hvd.Compression.fp16),
        "gathered": hvd.allgather(np.arange(me)),
        "sent": hvd.broadcast(native, 1),
        "scattered": hvd.reducescatter(np.arange(4, dtype="float32") * me, op=hvd.Sum),
        "averaged": hvd.reducescatter([2.0 * me, 4.0 * me], name="share"),
    }
    assert {type(value) for value in results.values()} == {type(native)}
    with pytest.warns(DeprecationWarning, match="average="):
        results["old"] = hvd.allreduce(float(me), average=False)
    with pytest.raises(ValueError, match="either op or average"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    with pytest.raises(RuntimeError, match=r"Callback|broadcast_variables"):
        hvd.broadcast_global_variables(0)
    return {name: numpy(value).tolist() for name, value in results.items()}


def test_values(keras_pool: RankPool):
    for rank, found in enumerate(keras_pool.run(_values)):
        assert found == {
            "number": 1.5,
            "named": 1.5,
            "sum": [3.0, 30.0],
            "scaled": [6.0],
            "fp16": [1.5, 15.0],
            "gathered": [0, 0, 1],
            "sent": [2.0, 20.0],
            "scattered": [[0.0, 3.0], [6.0, 9.0]][rank],
            "averaged": [[3.0], [6.0]][rank],
            "old": 3.0,
        }


def _graph() -> Any:
    """A v1 graph with a session, as scripts for TensorFlow 1 have it."""
    import tensorflow as tf

    keras, hvd = front_end()
    with tf.Graph().as_default():
        keras = tf.compat.v1.keras
        session = tf.compat.v1.Session()
        keras.backend.set_session(session)
        v = tf.compat.v1.get_variable("v", initializer=float(hvd.rank() + 1))
        session.run(v.initializer)
        hvd.broadcast_global_variables(1)
        results = hvd.allreduce(float(hvd.rank())), session.run(v)
    keras.backend.clear_session()
    return [float(result) for result in results]


def test_values_in_a_v1_graph(keras_pools: dict[str, RankPool]):
    assert keras_pools["tf_keras"].run(_graph) == [[0.5, 2.0]] * 2


def test_flavours_are_what_they_say(keras_pool: RankPool, request: pytest.FixtureRequest):
    assert keras_pool.run(flavour)[0] in request.node.name
