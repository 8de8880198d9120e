"""Train on handwritten digits with `fit`, step by step as Horovod's documentation has it.

    horovodrun -np 2 python examples/tensorflow2/tensorflow2_keras_mnist.py
    TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python examples/tensorflow2/tensorflow2_keras_mnist.py

The second command uses Keras 2 (the package tf-keras) instead of Keras 3. The data are the 1,797
images that come with scikit-learn, or MNIST if `--data-dir` holds its four IDX files (gzipped or
not). What a single-process script would not have is marked "Horovod" and numbered.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import horovod.tensorflow.keras as hvd

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--warmup-epochs", type=int, default=3, help="until the full learning rate")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one process")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument(
        "--checkpoint-dir", type=Path, default=Path("checkpoints/tensorflow2_keras_mnist")
    )
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
            tf.keras.layers.Dense(10, activation="softmax"),
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


def verbosity() -> int:
    """Rank 0 alone speaks: a bar where somebody watches, else a line for every epoch.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stdout.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return 0 if hvd.rank() != 0 else 1 if watched else 2


def main() -> int:
    args = parse_arguments()
    hvd.init()  # Horovod 1: find the other processes
    choose_device(args.no_cuda)  # Horovod 2: one GPU for each process

    train_x, train_y, test_x, test_y = load_data(args.data_dir)
    dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y))
    # Shuffled differently on every process, which is as good as a part of its own here.
    dataset = dataset.repeat().shuffle(10000).batch(args.batch_size)

    model = make_model(train_x.shape[1])
    scaled_lr = args.lr * hvd.size()  # Horovod 3: the learning rate goes with the processes
    optimizer = tf.keras.optimizers.Adam(scaled_lr)
    optimizer = hvd.DistributedOptimizer(optimizer)  # Horovod 4: average the gradients of all
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        # Horovod 5: all go on from what rank 0 has, be it random or from a checkpoint.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Horovod 6: average metrics over all, before other callbacks look at them.
        hvd.callbacks.MetricAverageCallback(),
        # Horovod 7: a large learning rate from the start may spoil the result, so approach it.
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=scaled_lr,
            warmup_epochs=args.warmup_epochs,
            verbose=int(hvd.rank() == 0),
        ),
        # For `horovodrun --dashboard`.
        tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: hvd.stats.log(logs)),
    ]
    if hvd.rank() == 0:  # Horovod 8: one process writes, or they would spoil each other's files
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        path = str(args.checkpoint_dir / "checkpoint-{epoch}.keras")
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(path))

    model.fit(
        dataset,
        steps_per_epoch=500 // hvd.size(),  # Horovod 9: together as many as one alone
        callbacks=callbacks,
        epochs=args.epochs,
        verbose=verbosity(),  # Horovod 10: one process speaks
    )

    # All have the same model and the same test data, so they need not ask each other.
    _, result = model.evaluate(test_x, test_y, verbose=0)
    if hvd.rank() == 0:
        print(f"final test accuracy: {result:.2%} with {hvd.size()} process(es)", flush=True)
    return int(args.target_accuracy is not None and result < args.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
