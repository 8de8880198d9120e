"""A program in the shape of the one on Horovod's MXNet page, with its calls as they stand there."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from sklearn.datasets import load_digits

import horovod.mxnet as hvd
from tests.ranks import RankPool

BATCH = 32


def _page() -> tuple[list[float], list[Any]]:
    context = mx.cpu(hvd.local_rank())  # the page numbers CPUs by rank
    mx.random.seed(hvd.rank())  # begin differently: the broadcast has to make it alike
    digits = load_digits()
    mine = slice(hvd.rank(), None, hvd.size())
    batches = mx.io.NDArrayIter(
        (digits.data[mine] / 16).astype("float32"),
        digits.target[mine].astype("float32"),
        BATCH,
        last_batch_handle="discard",
    )

    model = mx.gluon.nn.HybridSequential()
    model.add(mx.gluon.nn.Dense(32, activation="relu"), mx.gluon.nn.Dense(10))
    model.hybridize()
    optimizer = mx.optimizer.create("sgd", learning_rate=0.5, rescale_grad=1.0 / BATCH)
    model.initialize(mx.init.Xavier(), ctx=context)
    params = model.collect_params()
    if params is not None:
        hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(params, optimizer)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    losses = []
    for _ in range(3):
        batches.reset()
        for batch in batches:
            data = batch.data[0].as_in_context(context)
            label = batch.label[0].as_in_context(context)
            with mx.autograd.record():
                loss = loss_of(model(data.astype("float32", copy=False)), label)
            loss.backward()
            trainer.step(BATCH)
        losses.append(float(loss.mean().asscalar()))
    return losses, [each.data().asnumpy().tolist() for each in params.values()]


def test_the_program_of_upstreams_page_trains(mx_pool2: RankPool):
    (first, weights), (_, others) = mx_pool2.run(_page)
    assert weights == others
    assert first[-1] < first[0]
