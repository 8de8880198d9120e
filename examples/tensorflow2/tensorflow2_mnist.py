"""Train a small convolutional network on handwritten digits, with a training loop of your own.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_mnist.py
    mpirun -np 2 python examples/tensorflow2/tensorflow2_mnist.py
    python examples/tensorflow2/tensorflow2_mnist.py

The data are the 1,797 images that come with scikit-learn, or MNIST if `--data-dir` holds its four
IDX files (gzipped or not). Lines that a single-process script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.tensorflow as hvd

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--steps", type=int, default=1000, help="steps of all processes together")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument(
        "--warmup", type=float, default=0.25, help="share of the steps until it is that of all"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--fp16-allreduce", action="store_true", help="16 bits on the wire")
    parser.add_argument(
        "--checkpoint-dir", type=Path, default=Path("checkpoints/tensorflow2_mnist")
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


def load_data(data_dir: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images (one channel, values 0 to 1) and labels, then those for tests."""
    if data_dir is not None:
        train_x, train_y, test_x, test_y = (read_idx(data_dir, name) for name in IDX_FILES)
        white = 255
    else:
        digits = load_digits()
        train_x, test_x, train_y, test_y = train_test_split(
            digits.images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
        )
        white = 16
    train_x, test_x = ((x / white).astype("float32")[..., None] for x in (train_x, test_x))
    return train_x, train_y.astype("int64"), test_x, test_y.astype("int64")


def read_idx(data_dir: Path, name: str) -> np.ndarray:
    """One IDX file: two zero bytes, the type (8: bytes), the number of dimensions, the shape."""
    plain, packed = data_dir / name, data_dir / f"{name}.gz"
    if not plain.exists() and not packed.exists():
        raise SystemExit(f"{data_dir} has neither {name} nor {name}.gz")
    content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise SystemExit(f"{name} in {data_dir} is not an IDX file of bytes")
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# -- model ---------------------------------------------------------------------------------------


def make_model(image_size: int) -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((image_size, image_size, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(2),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dropout(0.5),
            tf.keras.layers.Dense(10),
        ]
    )


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


# -- training ------------------------------------------------------------------------------------


def learning_rate(args: argparse.Namespace, done: float) -> float:
    """Horovod: N processes take N times the batch, so a step may be N times as long.

    But not from the start, which would throw the untrained model off. `done` is the share of the
    steps that are done.
    """
    progress = min(1.0, done / args.warmup) if args.warmup else 1.0
    return args.lr * (1 + (hvd.size() - 1) * progress)


def accuracy(model: tf.keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images the model gets right; every process looks at its part of them."""
    images, labels = (array[hvd.rank() :: hvd.size()] for array in (images, labels))
    correct = 0
    for start in range(0, len(labels), 512):
        part = slice(start, start + 512)
        guesses = tf.argmax(model(images[part], training=False), axis=1)
        correct += int(tf.math.count_nonzero(guesses == labels[part]))
    # Horovod: add counts, not rates, so that unequal parts weigh what they should.
    right, seen = hvd.allreduce(tf.constant([correct, len(labels)]), op=hvd.Sum, name="accuracy")
    return int(right) / int(seen)


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    device = choose_device(args.no_cuda)  # Horovod: one GPU for each process
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())  # other dropout on every process
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    train_x, train_y, test_x, test_y = load_data(args.data_dir)
    dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y))
    # Horovod: every process sees its own part of the training data.
    dataset = dataset.shard(hvd.size(), hvd.rank())
    dataset = dataset.shuffle(2000).repeat().batch(args.batch_size).prefetch(2)

    model = make_model(train_x.shape[1])
    optimizer = tf.keras.optimizers.Adam(args.lr)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(args.checkpoint_dir), max_to_keep=2)
    if args.resume and hvd.rank() == 0 and manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    # Horovod: all start from what rank 0 has, be it random or from a checkpoint.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # Horovod: average the gradients over all processes.
        tape = hvd.DistributedGradientTape(
            tape, compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
        )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    first = int(optimizer.iterations)
    say(
        f"training on {len(train_x)} images with {hvd.size()} process(es) on {device}"
        + (f", from step {first}" if first else ""),
        flush=True,
    )
    started = time.monotonic()
    last = args.steps // hvd.size()  # Horovod: together they make as many as one alone would
    for step, (images, labels) in enumerate(dataset.take(max(0, last - first)), first + 1):
        optimizer.learning_rate = learning_rate(args, step / last)
        loss = train_step(images, labels)
        if step % 10 == 0:
            hvd.stats.log(loss=loss)  # for `horovodrun --dashboard`
        if step % 50 == 0 or step == last:
            say(f"step {step}: loss {float(loss):.4f}", flush=True)  # that of rank 0

    result = accuracy(model, test_x, test_y)
    if hvd.rank() == 0:  # Horovod: all have the same model, so one of them writes it
        manager.save()
    seconds = time.monotonic() - started
    say(f"final test accuracy: {result:.2%} after {seconds:.1f} s", flush=True)
    if args.target_accuracy is not None and result < args.target_accuracy:
        say(f"below the target of {args.target_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
