"""One rank of benchmarks/tensorflow.py: trains with `fit` when told to.

Started by `benchmarks/tensorflow.py` with a plan in JSON as the only argument. It reads orders from
standard input, one JSON object a line (a model, how to train it, a number of steps), and answers
each with a line on standard output. Everything else that is printed here goes to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

# Not this folder, where `import tensorflow` would find benchmarks/tensorflow.py.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from benchmarks.processes import Member  # noqa: E402
from benchmarks.tensorflow_report import MODELS  # noqa: E402

DISTINCT_BATCHES = 8
SKIPPED = 4  # first steps of a turn: in them the ranks wait for each other to begin


def layers(model: str) -> list[Any]:
    make = tf.keras.layers
    if model == "mlp":
        return [
            make.Input((784,)),
            make.Dense(1024, activation="relu"),
            make.Dense(1024, activation="relu"),
            make.Dense(10),
        ]
    return [  # of the MNIST example that Horovod's documentation uses, without dropout
        make.Input((28, 28, 1)),
        make.Conv2D(32, 3, activation="relu"),
        make.Conv2D(64, 3, activation="relu"),
        make.MaxPooling2D(2),
        make.Flatten(),
        make.Dense(128, activation="relu"),
        make.Dense(10),
    ]


def make_data(model: str, rank: int) -> tf.data.Dataset:
    """An endless row of batches that are ready in memory, others on every rank."""
    shape, size = ((784,) if model == "mlp" else (28, 28, 1)), MODELS[model].batch
    random = np.random.default_rng(1000 + rank)
    inputs = random.random((DISTINCT_BATCHES, size, *shape), dtype=np.float32)
    labels = random.integers(0, 10, (DISTINCT_BATCHES, size))
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat().prefetch(2)


def make_model(model: str, optimizer: Any) -> Any:
    """A compiled model; the same start in every Keras."""
    made = tf.keras.Sequential(layers(model))
    random = np.random.default_rng(1)
    made.set_weights(
        [
            random.standard_normal(weight.shape, np.float32)
            * np.sqrt(2 / np.prod(weight.shape[:-1]))
            if weight.ndim > 1
            else np.zeros_like(weight)
            for weight in made.get_weights()
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, loss, jit_compile=False)
    return made


class Clock(tf.keras.callbacks.Callback):
    """When the steps of a turn ended."""

    _supports_tf_logs = True  # do not let tf-keras convert the metrics for us after every step

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())

    def seconds_per_step(self) -> float:
        measured = self.ends[SKIPPED - 1 :]
        return (measured[-1] - measured[0]) / (len(measured) - 1)


class Trainer:
    """The models of this rank, each made when it is first trained."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._ready: dict[tuple[str, str], tuple[Any, Any, list[Any]]] = {}

    def train(self, model: str, way: str, steps: int) -> dict[str, float]:
        """Seconds per step, and the mean loss of all steps on this rank (all ranks: strategy)."""
        if (model, way) not in self._ready:
            self._ready[model, way] = self.make(model, way)
        trained, data, callbacks = self._ready[model, way]
        clock = Clock()
        history = trained.fit(
            data, steps_per_epoch=steps + SKIPPED, callbacks=[*callbacks, clock], verbose=0
        )
        return {"seconds": clock.seconds_per_step(), "loss": float(history.history["loss"][0])}

    def make(self, model: str, way: str) -> tuple[Any, Any, list[Any]]:
        """A model, its data, and callbacks for `fit`."""
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
        data = make_data(model, self.rank)
        if way == "plain":
            return make_model(model, optimizer), data, []
        import horovod.tensorflow.keras as hvd

        distributed = hvd.DistributedOptimizer(optimizer)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        return make_model(model, distributed), data, [broadcast]


class StrategyTrainer(Trainer):
    """The same with TensorFlow's own strategy for several processes."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        communication = tf.distribute.experimental.CommunicationImplementation.RING
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=communication
            )
        )

    def make(self, model: str, way: str) -> tuple[Any, Any, list[Any]]:
        # From a function, so that every rank's batches are its own and nobody cuts them up.
        data = self.strategy.distribute_datasets_from_function(
            lambda _: make_data(model, self.rank)
        )
        with self.strategy.scope():
            made = make_model(model, tf.keras.optimizers.SGD(0.01, momentum=0.9))
        return made, data, []


def main(plan: dict[str, Any]) -> None:
    member = Member()
    tf.config.threading.set_intra_op_parallelism_threads(plan["intra_op"])
    tf.config.threading.set_inter_op_parallelism_threads(plan["inter_op"])

    if plan["strategy"]:
        strategy = StrategyTrainer(plan["rank"])
        member.obey(lambda order: strategy.train(**order))
        return
    import horovod.tensorflow.keras as hvd

    hvd.init()
    trainer = Trainer(hvd.rank())
    member.obey(lambda order: trainer.train(**order))
    hvd.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
