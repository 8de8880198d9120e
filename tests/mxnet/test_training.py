"""Parameters, DistributedOptimizer and DistributedTrainer on two ranks."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd
from tests.ranks import RankPool

# -- in place, numpy arrays, lifetime ----------------------------------------------------------


def _in_place() -> list[Any]:
    rank = hvd.rank()
    array = mx.nd.array([rank, 1.0])
    same = hvd.allreduce_(array, op=hvd.Sum)
    assert same is array
    pair = hvd.grouped_allreduce_([mx.nd.array([rank]), mx.nd.array([[1.0 + rank]])], name="pair")
    sent = mx.nd.array([rank])
    hvd.broadcast_(sent, root_rank=1)
    temporary = hvd.allreduce(mx.nd.ones((100, 100)) * (rank + 1), op=hvd.Sum)
    assert hvd.grouped_allreduce([]) == []
    with pytest.raises(AssertionError, match="Adasum"):
        hvd.allreduce(array, op=hvd.Adasum)
    with pytest.raises(AssertionError, match="Average or Sum"):
        hvd.reducescatter(array, op=hvd.Max)
    with pytest.raises(ValueError, match="expected an mxnet NDArray, not list"):
        hvd.allreduce([1.0])
    assert np.all(temporary.asnumpy() == 3)
    return [
        array.asnumpy().tolist(),
        [each.asnumpy().tolist() for each in pair],
        sent.asscalar(),
    ]


def test_in_place(mx_pool2: RankPool):
    assert mx_pool2.run(_in_place) == [[[1.0, 2.0], [[0.5], [[1.5]]], 1.0]] * 2


def _every_type() -> None:
    for dtype in ("uint8", "int8", "int32", "int64", "float16", "float32", "float64"):
        mine = mx.nd.array([[1 + hvd.rank(), 2]], dtype=dtype)
        for found, expected in (
            (hvd.allreduce(mine, op=hvd.Sum), [[3, 4]]),
            (hvd.allgather(mine), [[1, 2], [2, 2]]),
            (hvd.broadcast(mine, 1), [[2, 2]]),
        ):
            assert found.dtype == mine.dtype
            assert found.asnumpy().tolist() == expected


def test_every_type(mx_pool2: RankPool):
    mx_pool2.run(_every_type)


# -- parameters ----------------------------------------------------------------------------------


def _parameters() -> list[Any]:
    rank = hvd.rank()
    arrays = {"b": mx.nd.array([rank]), "a": mx.nd.array([[rank, rank]])}
    hvd.broadcast_parameters(arrays, root_rank=1, prefix="first.")
    mx.random.seed(rank)
    ready, deferred = mx.gluon.nn.Dense(3, in_units=2), mx.gluon.nn.Dense(3)
    for block in (ready, deferred):
        block.initialize(mx.init.Normal(1.0))
    for number, block in enumerate((ready, deferred)):
        hvd.broadcast_parameters(block.collect_params(), root_rank=0, prefix=f"{number}.")
    deferred(mx.nd.ones((1, 4)))  # now the shape is known
    with pytest.raises(ValueError, match="must be a dict or a ParameterDict, not list"):
        hvd.broadcast_parameters([arrays["a"]])
    return [
        {name: value.asnumpy().tolist() for name, value in arrays.items()},
        ready.weight.data().asnumpy().tolist(),
        deferred.weight.data().asnumpy().tolist(),
    ]


def test_broadcast_parameters(mx_pool2: RankPool):
    first, second = mx_pool2.run(_parameters)
    assert first == second
    assert first[0] == {"a": [[1.0, 1.0]], "b": [1.0]}


def _disagreement() -> list[Any]:
    """Of two operations that are started together the first fails; the second is waited for."""
    rank = hvd.rank()
    arrays = {"a": mx.nd.zeros(1 + rank), "b": mx.nd.array([rank])}
    with pytest.raises(mx.base.MXNetError, match=r"odd\.a"):
        hvd.broadcast_parameters(arrays, root_rank=1, prefix="odd.")
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
    weights = [mx.nd.zeros(1 + rank), mx.nd.zeros(1)]
    gradients = [mx.nd.ones(1 + rank), mx.nd.array([rank])]
    with pytest.raises(mx.base.MXNetError, match="rank 1"):
        optimizer.update_multi_precision([0, 1], weights, gradients, [None, None])
    return [arrays["b"].asscalar(), gradients[1].asscalar(), weights[1].asscalar()]


def test_what_ranks_do_not_agree_on_fails_and_leaves_nothing_in_flight(mx_pool2: RankPool):
    assert mx_pool2.run(_disagreement) == [[1.0, 0.5, 0.0]] * 2


# -- training ------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def network() -> Any:
    block = mx.gluon.nn.Sequential()
    block.add(mx.gluon.nn.Dense(5, in_units=4, activation="tanh"), mx.gluon.nn.Dense(1, in_units=5))
    block.initialize(mx.init.Xavier())
    return block


def train(block: Any, trainer: Any, x: Any, y: Any) -> list[Any]:
    loss = mx.gluon.loss.L2Loss()
    for _ in range(5):
        with mx.autograd.record():
            value = loss(block(mx.nd.array(x)), mx.nd.array(y))
        value.backward()
        trainer.step(len(x))
    return [parameter.data().asnumpy() for parameter in block.collect_params().values()]


def _gluon(options: dict[str, Any]) -> list[Any]:
    mx.random.seed(7)
    block, alone = network(), network()
    for mine, other in zip(
        block.collect_params().values(), alone.collect_params().values(), strict=True
    ):
        other.set_data(mine.data())
    hvd.broadcast_parameters(block.collect_params())
    hvd.broadcast_parameters(alone.collect_params(), prefix="alone.")
    half = slice(hvd.rank() * 8, hvd.rank() * 8 + 8)
    trainer = hvd.DistributedTrainer(
        block.collect_params(), "sgd", {"learning_rate": 0.1}, **options
    )
    together = train(block, trainer, X[half], Y[half])
    plain = mx.gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
    return [together, train(alone, plain, X, Y)]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}, {"prefix": "p."}],
    ids=str,
)
def test_trainer_is_like_training_alone(mx_pool2: RankPool, options: dict[str, Any]):
    (first, alone), (second, _) = mx_pool2.run(_gluon, options)
    for mine, other, expected in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def _compressed() -> None:
    _gluon({"compression": hvd.Compression.fp16})
    block = network()
    with pytest.warns(UserWarning, match="averages gradients itself"):
        hvd.DistributedTrainer(
            block.collect_params(), hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
        )
    with pytest.raises(ValueError, match="must be a positive number"):
        hvd.DistributedTrainer(block.collect_params(), "sgd", gradient_predivide_factor=0.0)


def test_compression_and_unwrapping(mx_pool2: RankPool):
    mx_pool2.run(_compressed)


def _optimizer(num_groups: int) -> list[Any]:
    rank = hvd.rank()
    optimizer = hvd.DistributedOptimizer(
        mx.optimizer.create("sgd", learning_rate=1.0), num_groups=num_groups
    )
    assert optimizer.lr == 1.0
    weight = mx.nd.array([0.0])
    optimizer.update(3, weight, mx.nd.array([rank]), optimizer.create_state(3, weight))
    weights = [mx.nd.zeros(1) for _ in range(3)]
    gradients = [mx.nd.array([rank + index]) for index in range(3)]
    states = [optimizer.create_state(index, each) for index, each in enumerate(weights)]
    optimizer.update_multi_precision([0, 1, 2], weights, gradients, states)
    return [weight.asscalar(), [each.asscalar() for each in weights]]


@pytest.mark.parametrize("num_groups", [0, 2])
def test_optimizer(mx_pool2: RankPool, num_groups: int):
    assert mx_pool2.run(_optimizer, num_groups) == [[-0.5, [-0.5, -1.5, -2.5]]] * 2


def _module() -> list[float]:
    mx.random.seed(hvd.rank())
    data = mx.sym.Variable("data")
    output = mx.sym.LinearRegressionOutput(
        mx.sym.FullyConnected(data, num_hidden=1, name="dense"), name="lin"
    )
    half = slice(hvd.rank() * 8, hvd.rank() * 8 + 8)
    batches = mx.io.NDArrayIter(X[half], Y[half], 4, label_name="lin_label")
    module = mx.mod.Module(output, label_names=["lin_label"])
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params()
    arguments, auxiliary = module.get_params()
    hvd.broadcast_parameters(arguments)
    hvd.broadcast_parameters(auxiliary)
    module.set_params(arguments, auxiliary)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.05))
    module.fit(batches, optimizer=optimizer, kvstore=None, num_epoch=3)
    return module.get_params()[0]["dense_weight"].asnumpy().reshape(-1).tolist()


def test_module(mx_pool2: RankPool):
    first, second = mx_pool2.run(_module)
    assert first == second
    assert abs(first[0]) > 0
