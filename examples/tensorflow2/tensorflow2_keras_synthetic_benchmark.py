"""Measure how many images a second `fit` trains on, with made-up data that costs nothing.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_keras_synthetic_benchmark.py
    horovodrun -np 2 python examples/tensorflow2/tensorflow2_keras_synthetic_benchmark.py \
        --model MobileNet --batch-size 4 --image-size 64 --num-iters 3

The speed of one process alone is that of the same command without horovodrun; the total of N
processes over N times that is the scaling efficiency. With TF_USE_LEGACY_KERAS=1 it is Keras 2
(the package tf-keras) that trains.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import tensorflow as tf

import horovod.tensorflow.keras as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet50", help="a name of tf.keras.applications")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="measured together")
    parser.add_argument("--num-iters", type=int, default=10, help="number of measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="16 bits on the wire")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in 16 bits")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    args = parser.parse_args()
    if not callable(getattr(tf.keras.applications, args.model, None)):
        parser.error(f"tf.keras.applications has no {args.model}")
    return args


def choose_device(cpu_only: bool) -> str:
    """This process's own GPU if there is one, by local rank; else its share of the cores."""
    gpus = [] if cpu_only else tf.config.list_physical_devices("GPU")
    if gpus:
        own = gpus[hvd.local_rank() % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
        return "GPU"
    tf.config.set_visible_devices([], "GPU")
    share = max(1, (os.cpu_count() or 1) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(share)
    return "CPU"


class Rates(tf.keras.callbacks.Callback):
    """Images per second of every epoch, averaged over the processes."""

    def __init__(self, images_per_epoch: int, unit: str) -> None:
        super().__init__()
        self.images_per_epoch = images_per_epoch
        self.unit = unit
        self.rates: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mine = self.images_per_epoch / (time.perf_counter() - self.started)
        self.rates.append(float(hvd.allreduce(mine, name="rate")))
        if hvd.rank() == 0:
            rate = self.rates[-1]
            print(f"Iteration {epoch + 1}: {rate:.1f} img/sec per {self.unit}", flush=True)


def main() -> None:
    args = parse_arguments()
    hvd.init()
    unit = choose_device(args.no_cuda)
    tf.random.set_seed(hvd.rank())
    say = print if hvd.rank() == 0 else lambda *_, **__: None
    if args.mixed_precision:
        tf.keras.mixed_precision.set_global_policy("mixed_float16")

    shape = (args.image_size, args.image_size, 3)
    model = getattr(tf.keras.applications, args.model)(weights=None, input_shape=shape)
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.01 * hvd.size()),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    # XLA, which Keras 3 would choose on a GPU, cannot compile the exchange of gradients.
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)

    images = tf.random.normal([args.batch_size, *shape])
    labels = tf.random.uniform([args.batch_size], maxval=1000, dtype=tf.int64)
    batches = tf.data.Dataset.from_tensors((images, labels)).repeat()

    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    say(f"Number of {unit}s: {hvd.size()}", flush=True)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    steps = max(1, args.num_warmup_batches)  # one at least, which also compiles and broadcasts
    model.fit(batches, steps_per_epoch=steps, callbacks=[broadcast], verbose=0)
    measured = Rates(args.batch_size * args.num_batches_per_iter, unit)
    model.fit(
        batches,
        steps_per_epoch=args.num_batches_per_iter,
        epochs=args.num_iters,
        callbacks=[measured],
        verbose=0,
    )

    mean = statistics.fmean(measured.rates)
    spread = 1.96 * statistics.pstdev(measured.rates)
    say(f"Img/sec per {unit}: {mean:.1f} +-{spread:.1f}")
    say(
        f"Total img/sec on {hvd.size()} {unit}(s): {hvd.size() * mean:.1f} "
        f"+-{hvd.size() * spread:.1f}"
    )


if __name__ == "__main__":
    main()
