"""Save and load estimators and models through Spark ML: `write().save` and `load`.

Beside Spark ML's own metadata lie the values of parameters: JSON where that is enough, pickled
otherwise. As with any pickle, load only what you would also run.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import cloudpickle
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

_PICKLED = "horovod_pickled"


def encode(name: str, value: Any) -> Any:
    """Return a value in a form that JSON can hold."""
    try:
        if json.loads(json.dumps(value)) == value and not isinstance(value, dict):
            return value
    except (TypeError, ValueError):
        pass
    try:
        return {_PICKLED: base64.b64encode(cloudpickle.dumps(value)).decode()}
    except Exception as error:
        raise ValueError(
            f"{name} cannot be saved, because it cannot be pickled: {error}"
        ) from error


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, dict) and _PICKLED in value:
        return cloudpickle.loads(base64.b64decode(value[_PICKLED]))
    return value


def pack_for_ranks(value: Any, what: str, they: str = "it") -> bytes:
    """Pickle what the processes of a training need; ValueError that names it if that fails."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ValueError(
            f"{what} cannot be sent to the processes, because {they} cannot be pickled: "
            f"{type(error).__name__}: {error}"
        ) from error


class HorovodParamsWriter(MLWriter):
    """Saves an instance of a class that has `_encode` and `_decode`."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        values = {
            param.name: self.instance._encode(param.name, value)
            for param, value in self.instance._paramMap.items()
        }
        DefaultParamsWriter.saveMetadata(
            self.instance, path, _session_or_context(self), paramMap=values
        )


class HorovodParamsReader(MLReader):
    """Loads an instance of `cls`."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, _session_or_context(self))
        name = f"{self.cls.__module__}.{self.cls.__name__}"
        if metadata["class"] != name:
            raise ValueError(f"{path} holds a {metadata['class']}, not a {name}")
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        for key, value in instance._decode_all(metadata["paramMap"]).items():
            instance._set(**{key: value})
        return instance


def _session_or_context(worker: Any) -> Any:
    """Return what Spark ML's functions take: a session in Spark 4, a context in Spark 3."""
    import pyspark

    return worker.sparkSession if int(pyspark.__version__.split(".")[0]) >= 4 else worker.sc


class Persistent(MLReadable, MLWritable):
    """Lets users save and load the estimators and models into which it is mixed."""

    def write(self) -> Any:
        return HorovodParamsWriter(self)

    @classmethod
    def read(cls) -> Any:
        return HorovodParamsReader(cls)

    def _encode(self, name: str, value: Any) -> Any:
        return encode(name, value)

    def _decode_all(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: decode(value) for name, value in values.items()}
