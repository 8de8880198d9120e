"""Train on handwritten digits with Keras 3, on whichever backend: TensorFlow, torch or JAX.

    KERAS_BACKEND=torch horovodrun -np 2 python examples/keras/keras_mnist.py
    KERAS_BACKEND=jax horovodrun -np 2 python examples/keras/keras_mnist.py
    KERAS_BACKEND=tensorflow horovodrun -np 2 python examples/keras/keras_mnist.py

The data are the 1,797 images that come with scikit-learn, or MNIST if `--data-dir` holds its four
IDX files (gzipped or not). Lines that a single-process script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.keras as hvd

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument(
        "--warmup-epochs", type=int, default=3, help="epochs until it is that of all processes"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/keras_mnist.keras"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
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


def own_part(array: np.ndarray) -> np.ndarray:
    """Every N-th element for each of N processes, equally many for all.

    All must make the same number of steps, because every step waits for all.
    """
    return array[hvd.rank() :: hvd.size()][: len(array) // hvd.size()]


# -- model ---------------------------------------------------------------------------------------


def make_model(image_size: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((image_size, image_size, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def choose_device() -> None:
    """This process's own GPU if there is one, by local rank: every backend has its own way."""
    if keras.config.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    elif keras.config.backend() == "jax":
        import jax

        jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank()))
    else:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")


def verbosity() -> int:
    """Rank 0 alone speaks: a bar where somebody watches, else a line for every epoch.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stdout.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return 0 if hvd.rank() != 0 else 1 if watched else 2


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    choose_device()  # Horovod: one GPU for each process
    keras.utils.set_random_seed(args.seed + hvd.rank())  # other dropout on every process

    train_x, train_y, test_x, test_y = load_data(args.data_dir)
    train_x, train_y = own_part(train_x), own_part(train_y)  # Horovod: a part for each process

    scaled_lr = args.lr * hvd.size()  # Horovod: the learning rate goes with the processes
    if args.resume and hvd.rank() == 0 and args.checkpoint.exists():
        model = hvd.load_model(args.checkpoint)  # Horovod: one reads, and gives it to the others
        model.optimizer.learning_rate = scaled_lr  # there may be another number of processes
    else:
        model = make_model(train_x.shape[1])
        # Horovod: average the gradients over all processes before every step.
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(scaled_lr))
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # Horovod: go on from what rank 0 has
        hvd.callbacks.MetricAverageCallback(),  # Horovod: metrics of all
        # For `horovodrun --dashboard`.
        keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: hvd.stats.log(logs)),
        # Horovod: a large learning rate from the start may spoil the result, so approach it.
        hvd.callbacks.LearningRateWarmupCallback(scaled_lr, args.warmup_epochs),
    ]
    if hvd.rank() == 0:  # Horovod: one process writes
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
        backend = keras.config.backend()
        print(f"training with {hvd.size()} process(es) on {backend}", flush=True)
    model.fit(
        train_x,
        train_y,
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=verbosity(),
    )

    # All have the same model and the same test data, so they need not ask each other.
    _, result = model.evaluate(test_x, test_y, verbose=0)
    if hvd.rank() == 0:
        print(f"final test accuracy: {result:.2%}", flush=True)
    return int(args.target_accuracy is not None and result < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
