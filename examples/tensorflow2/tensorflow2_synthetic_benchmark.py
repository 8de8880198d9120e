"""Measure how many images a second a network trains on, with made-up data that costs nothing.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_synthetic_benchmark.py
    horovodrun -np 2 python examples/tensorflow2/tensorflow2_synthetic_benchmark.py \
        --model MobileNet --batch-size 4 --image-size 64 --num-iters 3

The speed of one process alone is that of the same command without horovodrun; the total of N
processes over N times that is the scaling efficiency.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import tensorflow as tf

import horovod.tensorflow as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet50", help="a name of tf.keras.applications")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="measured together")
    parser.add_argument("--num-iters", type=int, default=10, help="number of measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="16 bits on the wire")
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


def make_step(args: argparse.Namespace) -> Callable[[], tf.Tensor]:
    """A training step on one batch that stays on the device."""
    shape = (args.image_size, args.image_size, 3)
    model = getattr(tf.keras.applications, args.model)(weights=None, input_shape=shape)
    optimizer = tf.keras.optimizers.SGD(0.01 * hvd.size())
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy()
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    images = tf.random.normal([args.batch_size, *shape])
    labels = tf.random.uniform([args.batch_size], maxval=1000, dtype=tf.int64)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def measure(step: Callable[[], tf.Tensor], num_steps: int) -> float:
    """Seconds that `num_steps` steps take on this process."""
    started = time.perf_counter()
    for _ in range(num_steps):
        loss = step()
    if num_steps:
        loss.numpy()  # wait for a GPU
    return time.perf_counter() - started


def main() -> None:
    args = parse_arguments()
    hvd.init()
    unit = choose_device(args.no_cuda)
    tf.random.set_seed(hvd.rank())
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    say(f"Number of {unit}s: {hvd.size()}", flush=True)
    step = make_step(args)
    measure(step, args.num_warmup_batches)
    rates = []
    for iteration in range(args.num_iters):
        seconds = measure(step, args.num_batches_per_iter)
        mine = tf.constant(args.batch_size * args.num_batches_per_iter / seconds)
        rates.append(float(hvd.allreduce(mine, name="rate")))  # averaged over the processes
        say(f"Iteration {iteration + 1}: {rates[-1]:.1f} img/sec per {unit}", flush=True)

    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    say(f"Img/sec per {unit}: {mean:.1f} +-{spread:.1f}")
    say(
        f"Total img/sec on {hvd.size()} {unit}(s): {hvd.size() * mean:.1f} "
        f"+-{hvd.size() * spread:.1f}"
    )


if __name__ == "__main__":
    main()
