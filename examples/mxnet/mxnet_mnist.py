"""Train a small network on handwritten digits with Gluon, on several processes.

    horovodrun -np 2 python examples/mxnet/mxnet_mnist.py

The data are the 1,797 images that come with scikit-learn. Lines that exist because of Horovod are
marked "Horovod".
"""

from __future__ import annotations

import argparse
import sys

import mxnet as mx
from mxnet import autograd, gluon
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.mxnet as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.0015, help="learning rate of one process")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    context = mx.gpu(hvd.local_rank()) if mx.context.num_gpus() else mx.cpu()

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, digits.target.astype("float32"), test_size=0.2, random_state=0
    )
    # Horovod: every process trains on its own part of the images, all of them equally many.
    share = len(train_images) // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    dataset = gluon.data.ArrayDataset(train_images[mine], train_labels[mine])
    batches = gluon.data.DataLoader(dataset, args.batch_size, shuffle=True)

    network = gluon.nn.HybridSequential()
    network.add(
        gluon.nn.Conv2D(16, 3, activation="relu"),
        gluon.nn.Conv2D(32, 3, activation="relu"),
        gluon.nn.Flatten(),
        gluon.nn.Dense(10),
    )
    network.initialize(mx.init.Xavier(), ctx=context)
    network.hybridize()
    # Horovod: begin alike; the layers' shapes are not known before the first batch.
    params = network.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    # Horovod: with more images in a step, a larger learning rate, which it approaches in three
    # epochs: from the start it would throw the untrained model off.
    full = args.lr * hvd.size()
    rate = mx.lr_scheduler.PolyScheduler(
        args.epochs * len(batches),
        full,
        final_lr=full,
        warmup_steps=3 * len(batches),
        warmup_begin_lr=args.lr,
    )
    options = {"learning_rate": full, "lr_scheduler": rate}
    trainer = hvd.DistributedTrainer(params, "adam", options)  # Horovod: the gradients of all
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    for epoch in range(args.epochs):
        total = 0.0
        for batch, labels in batches:
            with autograd.record():
                loss = loss_of(network(batch.as_in_context(context)), labels.as_in_context(context))
            loss.backward()
            trainer.step(len(labels))
            total += loss.mean().asscalar()
        # Horovod: the average over the processes.
        average = hvd.allreduce(mx.nd.array([total / len(batches)]), name="loss").asscalar()
        hvd.stats.log(loss=average)  # for `horovodrun --dashboard`
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {average:.4f}", flush=True)

    answers = network(mx.nd.array(test_images, ctx=context)).argmax(axis=1).asnumpy()
    accuracy = float((answers == test_labels).mean())
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.2%}", flush=True)
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
