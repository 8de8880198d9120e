"""Train on handwritten digits with Keras 3, on the workers of a Ray cluster.

    KERAS_BACKEND=torch python examples/ray/keras_ray_mnist.py --num-workers 2

Without --address it starts Ray on this machine alone. The data are the 1,797 images that come with
scikit-learn. Lines that exist because of Horovod are marked.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import ray

from horovod.ray import RayExecutor


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a running cluster, such as auto or ray://HOST:10001")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.004, help="learning rate of one process")
    parser.add_argument("--target-accuracy", type=float, help="exit with status 1 if it is below")
    return parser.parse_args()


class Classifier:
    """Lives in every worker, and keeps its model between calls."""

    def __init__(self, lr: float) -> None:
        import keras
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        import horovod.keras as hvd

        hvd.init()  # Horovod
        keras.utils.set_random_seed(1)
        digits = load_digits()
        parts = train_test_split(
            (digits.images / 16.0).astype("float32"), digits.target, test_size=0.2, random_state=0
        )
        self.train_x, self.test_x, self.train_y, self.test_y = parts
        self.model = keras.Sequential(
            [
                keras.layers.Input((8, 8)),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        self.rate = lr * hvd.size()  # Horovod: it goes with the processes, see `fit`
        optimizer: Any = keras.optimizers.Adam(self.rate)
        optimizer = hvd.DistributedOptimizer(optimizer)  # Horovod
        self.model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    def fit(self, epochs: int, batch_size: int) -> list[float]:
        import horovod.keras as hvd

        count = len(self.train_x) // hvd.size()
        mine = slice(hvd.rank() * count, (hvd.rank() + 1) * count)  # Horovod
        history = self.model.fit(
            self.train_x[mine],
            self.train_y[mine],
            batch_size=batch_size,
            epochs=epochs,
            verbose=0,
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # Horovod
                hvd.callbacks.MetricAverageCallback(),  # Horovod
                hvd.callbacks.LearningRateWarmupCallback(self.rate, warmup_epochs=2),  # Horovod
            ],
        )
        return [float(loss) for loss in history.history["loss"]]

    def evaluate(self) -> float:
        return float(self.model.evaluate(self.test_x, self.test_y, verbose=0)[1])


def main() -> int:
    options = parse_arguments()
    ray.init(options.address, **({} if options.address else {"num_cpus": options.num_workers}))
    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=120), num_workers=options.num_workers
    )
    backend = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch")}
    executor.start(Classifier, executable_args=[options.lr], extra_env_vars=backend)
    try:
        epochs, batch_size = options.epochs, options.batch_size
        losses = executor.execute(lambda classifier: classifier.fit(epochs, batch_size))[0]
        for epoch, loss in enumerate(losses, 1):
            print(f"epoch {epoch:2}: loss {loss:.3f}")
        accuracy = executor.execute_single(lambda classifier: classifier.evaluate())
    finally:
        executor.shutdown()
    print(f"test accuracy {accuracy:.3f} with {options.num_workers} processes")
    return 1 if options.target_accuracy and accuracy < options.target_accuracy else 0


if __name__ == "__main__":
    sys.exit(main())
