"""One process of benchmarks/mxnet.py: a rank that takes the same steps whenever it is told to.

Started by `benchmarks/mxnet.py` as a module, with a plan in JSON as the only argument. Every order
is answered with the seconds of a step and the loss of the last one. The scheduler and the server of
MXNet's own kvstore are this module as well: for them importing MXNet is all there is to do.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import mxnet as mx
import numpy as np

from benchmarks.processes import Member

BATCH = 64
SIZES = (784, 1024, 1024, 10)


def make_network() -> Any:
    random = np.random.default_rng(1)
    network = mx.gluon.nn.HybridSequential()
    for rows, columns in itertools.pairwise(SIZES):
        last = columns == SIZES[-1]
        network.add(mx.gluon.nn.Dense(columns, in_units=rows, activation=None if last else "relu"))
    network.initialize(mx.init.Zero())
    for layer in network:
        weight = random.standard_normal(layer.weight.shape) * layer.weight.shape[1] ** -0.5
        layer.weight.set_data(mx.nd.array(weight.astype(np.float32)))
    network.hybridize()
    return network


def make_trainer(contender: str, network: Any) -> Any:
    params, options = network.collect_params(), {"learning_rate": 0.01, "momentum": 0.9}
    if contender == "ours":
        import horovod.mxnet as hvd

        hvd.init()
        hvd.broadcast_parameters(params)
        return hvd.DistributedTrainer(params, "sgd", options)
    if contender == "dist_sync":
        # The kvstore adds the gradients of the ranks up, hence another step size.
        options["learning_rate"] = 0.01 / 2
        return mx.gluon.Trainer(params, "sgd", options, kvstore="dist_sync")
    return mx.gluon.Trainer(params, "sgd", options, kvstore=None)


def main(plan: dict[str, Any]) -> None:
    member = Member()
    network = make_network()
    trainer = make_trainer(plan["contender"], network)
    random = np.random.default_rng(1000 + plan["rank"])
    inputs = mx.nd.array(random.standard_normal((BATCH, SIZES[0])).astype(np.float32))
    labels = mx.nd.array(random.integers(0, SIZES[-1], BATCH).astype(np.float32))
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def turn(_: Any) -> dict[str, float]:
        mx.nd.waitall()
        began = time.perf_counter()
        for _ in range(plan["steps"]):
            with mx.autograd.record():
                loss = loss_of(network(inputs), labels)
            loss.backward()
            trainer.step(BATCH)
        mx.nd.waitall()
        seconds = (time.perf_counter() - began) / plan["steps"]
        return {"seconds": seconds, "loss": float(loss.mean().asscalar())}

    member.obey(turn)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
