"""Save a PyTorch model and its optimizer together, so that the optimizer keeps its parameters."""

from __future__ import annotations

from typing import Any

from horovod.spark.common.serialization import Persistent, decode, encode

_WITH_MODEL = {"horovod_torch": "with the model"}


class PersistentWithOptimizer(Persistent):
    """Saves a model and its optimizer together; mixed into the classes that have both."""

    def _encode(self, name: str, value: Any) -> Any:
        if name == "model":
            both = {"model": value, "optimizer": self.getOrDefault("optimizer")}
            return encode("the model or its optimizer", both)
        if name == "optimizer":
            return _WITH_MODEL
        return super()._encode(name, value)

    def _decode_all(self, values: dict[str, Any]) -> dict[str, Any]:
        found = {name: decode(value) for name, value in values.items() if value != _WITH_MODEL}
        if "model" in found:
            both = found.pop("model")
            found.update({name: part for name, part in both.items() if part is not None})
        return found
