"""Pack Keras models, optimizers, losses and metrics as bytes, for driver, ranks and executors."""

from __future__ import annotations

import base64
import importlib
import os
import sys
import tempfile
from typing import Any

import cloudpickle

from horovod._keras.flavour import backend_of, is_tf_keras, keras_of

_HDF5 = b"\x89HDF"


def is_model(thing: Any) -> bool:
    """Return whether this is a model of Keras 3 or of tf-keras."""
    return any(
        base.__name__ == "Model" and base.__module__.split(".")[0] in ("keras", "tf_keras")
        for base in type(thing).__mro__
    )


def environment_of(model: Any) -> dict[str, str]:
    """Return the environment variables that give processes the same Keras."""
    if is_tf_keras(model):
        return {"TF_USE_LEGACY_KERAS": "1"}
    return {"KERAS_BACKEND": backend_of(model)}


def pack_model(model: Any) -> dict[str, Any]:
    """Pack a model without its optimizer and losses."""
    if not model.built:
        raise ValueError(
            "the model has no weights yet: give it an Input layer, or call build(input_shape)"
        )
    keras = keras_of(model)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        try:
            options = {"save_format": "keras"} if is_tf_keras(model) else {}
            keras.models.save_model(model, path, **options)
        except Exception as error:
            raise ValueError(
                "the model cannot be sent to the processes, because Keras cannot save it: "
                f"{type(error).__name__}: {error}"
            ) from error
        with open(path, "rb") as file:
            data = file.read()
    return {"keras": keras.__name__, "backend": backend_of(model), "data": data}


def unpack_model(packed: dict[str, Any], custom_objects: dict[str, Any] | None) -> Any:
    """Return the model, not compiled, of the Keras that it came from."""
    keras = keras_named(packed["keras"], packed["backend"])
    return _load(keras, packed["data"], custom_objects, compile=False)


def keras_named(name: str, backend: str) -> Any:
    """Import a Keras by its name, on a backend."""
    if name == "keras":
        if "keras" not in sys.modules:
            os.environ["KERAS_BACKEND"] = backend
        keras = importlib.import_module("keras")
        if keras.config.backend() != backend:
            raise RuntimeError(
                f"the model is of Keras on {backend}, but this process has Keras on "
                f"{keras.config.backend()}: set KERAS_BACKEND={backend}"
            )
        return keras
    return importlib.import_module(name)


def _load(keras: Any, data: bytes, custom_objects: Any, compile: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        with open(path, "wb") as file:
            file.write(data)
        return keras.models.load_model(
            path, custom_objects=dict(custom_objects or {}), compile=compile
        )


def model_from_bytes(data: bytes, model: Any, custom_objects: Any) -> Any:
    """Return the model in a checkpoint: a whole one, or the given one with weights from there."""
    keras = keras_of(model)
    if data.startswith(_HDF5):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.weights.h5")
            with open(path, "wb") as file:
                file.write(data)
            model.load_weights(path)
        return model
    try:
        return _load(keras, data, custom_objects, compile=True)
    except (TypeError, ValueError, AttributeError, ImportError):
        # A loss of the user's own cannot be loaded; the weights can.
        return _load(keras, data, custom_objects, compile=False)


def pack_part(keras: Any, part: Any) -> Any:
    """Pack a loss, a metric, an optimizer, or lists and dicts of them."""
    if isinstance(part, (list, tuple)):
        return [pack_part(keras, each) for each in part]
    if isinstance(part, dict):
        return {"dict": {name: pack_part(keras, each) for name, each in part.items()}}
    if part is None or isinstance(part, (str, int, float)):
        return part
    if hasattr(part, "get_config") and not isinstance(part, type):
        return {"keras": keras.saving.serialize_keras_object(part)}
    return {"pickled": cloudpickle.dumps(part)}


def unpack_part(keras: Any, packed: Any, custom_objects: dict[str, Any]) -> Any:
    """Return the object that `pack_part` was given."""
    if isinstance(packed, list):
        return [unpack_part(keras, each, custom_objects) for each in packed]
    if not isinstance(packed, dict):
        return packed
    if "dict" in packed:
        return {n: unpack_part(keras, p, custom_objects) for n, p in packed["dict"].items()}
    if "pickled" in packed:
        return cloudpickle.loads(packed["pickled"])
    with keras.utils.custom_object_scope(custom_objects):
        return keras.saving.deserialize_keras_object(packed["keras"])


def as_text(model: Any, custom_objects: dict[str, Any] | None = None) -> str:
    """Return a model as text, for the metadata of Spark ML."""
    packed = {"model": pack_model(model), "custom_objects": custom_objects or {}}
    return base64.b64encode(cloudpickle.dumps(packed)).decode()


def from_text(text: str) -> Any:
    """Return the model that `as_text` was given."""
    packed = cloudpickle.loads(base64.b64decode(text))
    return unpack_model(packed["model"], packed["custom_objects"])
