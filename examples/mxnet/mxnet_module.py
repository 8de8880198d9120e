"""Train a small network on handwritten digits with Module, on several processes.

    horovodrun -np 2 python examples/mxnet/mxnet_module.py

The data are the 1,797 images that come with scikit-learn. Lines that exist because of Horovod are
marked "Horovod".
"""

from __future__ import annotations

import argparse
import sys

import mxnet as mx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.mxnet as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of one process")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    context = mx.gpu(hvd.local_rank()) if mx.context.num_gpus() else mx.cpu()

    digits = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        (digits.data / 16).astype("float32"), digits.target, test_size=0.2, random_state=0
    )
    # Horovod: every process trains on its own part of the images, all of them equally many.
    share = len(train_images) // hvd.size() // args.batch_size * args.batch_size
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    training = mx.io.NDArrayIter(
        train_images[mine], train_labels[mine], args.batch_size, shuffle=True
    )
    testing = mx.io.NDArrayIter(test_images, test_labels, args.batch_size)

    data = mx.sym.Variable("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=128), act_type="relu")
    output = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=10), name="softmax")

    module = mx.mod.Module(output, context=context)
    module.bind(training.provide_data, training.provide_label)
    module.init_params(mx.init.Xavier())
    arguments, auxiliary = module.get_params()
    hvd.broadcast_parameters(arguments, root_rank=0)  # Horovod: begin alike
    hvd.broadcast_parameters(auxiliary, root_rank=0)
    module.set_params(arguments, auxiliary)

    # Horovod: the learning rate grows in three epochs to that of all processes.
    steps, full = share // args.batch_size, args.lr * hvd.size()
    rate = mx.lr_scheduler.PolyScheduler(
        args.epochs * steps, full, final_lr=full, warmup_steps=3 * steps, warmup_begin_lr=args.lr
    )
    # Horovod: the gradients of all processes; the batch of each of them divides the loss.
    optimizer = hvd.DistributedOptimizer(
        mx.optimizer.create(
            "adam", learning_rate=full, lr_scheduler=rate, rescale_grad=1.0 / args.batch_size
        )
    )
    module.fit(training, optimizer=optimizer, kvstore=None, num_epoch=args.epochs)

    accuracy = dict(module.score(testing, mx.metric.Accuracy()))["accuracy"]
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.2%}", flush=True)
    return int(args.target_accuracy is not None and accuracy < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
