"""Small models, data and training runs for the tests of this directory; they run in ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod._keras.flavour import keras_of
from tests.keras.flavours import flavour

BATCH = 4  # of each rank
FEATURES, OUTPUTS = 5, 2


def data(num_steps: int, size: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets for `num_steps` of all ranks."""
    random = np.random.default_rng(seed)
    rows = num_steps * size * BATCH
    x = random.normal(size=(rows, FEATURES)).astype("float32")
    y = random.normal(size=(rows, OUTPUTS)).astype("float32")
    return x, y


def share(array: np.ndarray, rank: int, size: int = 2) -> np.ndarray:
    """A rank's part of every step's batch."""
    steps = array.reshape(-1, size, BATCH, *array.shape[1:])
    return steps[:, rank].reshape(-1, *array.shape[1:])


def small_model(keras: Any, seed: int = 7) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(6, activation="tanh", name="hidden"),
            keras.layers.Dense(OUTPUTS, name="out"),
        ]
    )


def fit(model: Any, optimizer: Any, x: Any, y: Any, batch: int, **arguments: Any) -> Any:
    """Compile and train without shuffling; the History."""
    compile_arguments = arguments.pop("compile_arguments", {})
    # By its name a loss is not found again in a .h5 file of Keras 3.
    loss = keras_of(model).losses.MeanSquaredError()
    model.compile(optimizer=optimizer, loss=loss, **compile_arguments)
    return model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, **arguments)


def fit_together(keras: Any, hvd: Any, optimizer: Any, steps: int = 4, **arguments: Any) -> Any:
    """A model trained by this rank on its share."""
    x, y = data(steps)
    model = small_model(keras)
    rank = hvd.rank()
    fit(model, optimizer, share(x, rank), share(y, rank), BATCH, **arguments)
    return model


def fit_alone(keras: Any, optimizer: Any, steps: int = 4, **arguments: Any) -> Any:
    """A model trained by one process on the batches of two."""
    x, y = data(steps)
    model = small_model(keras)
    fit(model, optimizer, x, y, 2 * BATCH, **arguments)
    return model


def variable(keras: Any, value: Any, name: str = "w") -> Any:
    """A trainable variable."""
    value = np.asarray(value, "float32")
    if flavour() == "tf_keras":
        import tensorflow as tf

        return tf.Variable(value, name=name)
    return keras.Variable(value, name=name)


def tensor(keras: Any, value: Any) -> Any:
    """A gradient."""
    value = np.asarray(value, "float32")
    if flavour() == "tf_keras":
        import tensorflow as tf

        return tf.constant(value)
    return keras.ops.convert_to_tensor(value)


def numpy(value: Any) -> np.ndarray:
    """A copy of a variable's or a tensor's value."""
    if hasattr(value, "detach"):
        value = value.detach()
    return np.array(value)


def apply(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """One step with given gradients."""
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
