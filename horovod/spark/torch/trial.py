"""Try the model, its losses and metrics with one small batch, on the driver.

A wrong shape or type shows here in a second; on the ranks it would show after the data is written
and the processes have started.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from horovod.common.logging import get_logger
from horovod.spark.common.reading.columns import ColumnError, Rows
from horovod.spark.common.reading.row_buffer import row_count
from horovod.spark.torch.datamodule import tensors
from horovod.spark.torch.feeding import Feed, Objective, transform_outputs

logger = get_logger(__name__)

_WRONG_DATA = (IndexError, RuntimeError, TypeError, ValueError)
# Errors about what the driver may lack and processes have: a GPU, a process group, `hvd.init()`.
_ELSEWHERE = re.compile(r"cuda|device|nvidia|accelerator|initiali[sz]ed", re.IGNORECASE)
_WANTS_INTEGERS = re.compile(r"\b(Long|Int)\b")


@dataclass(frozen=True)
class Trial:
    """A trial of the packed model and losses, with the form of their input and the batch size."""

    payload: bytes
    feed: Feed
    kinds: dict[str, str]  # the columns' types, for messages
    metrics: Any
    batch_size: int

    def run(self, rows: Rows) -> None:
        """Raise ColumnError if the model, a loss or a metric fails with these rows.

        Failures that only the driver may have, such as a missing GPU, are ignored.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                self._try(rows)
            except ColumnError as error:
                # A model may accept one batch size only, so the trial with that size decides.
                if row_count(rows) == self.batch_size:
                    raise
                logger.debug("the trial with %d rows failed: %s", row_count(rows), error)
                self._try(_repeated(rows, self.batch_size))

    def _try(self, rows: Rows) -> None:
        packed = cloudpickle.loads(self.payload)  # a copy, so that the user's model stays as it is
        objective = Objective(
            self.feed, packed["loss"], packed["loss_constructors"], None, self.metrics
        )
        model = packed["model"].cpu()
        inputs, given, _ = self.feed.split(tensors(rows))
        fed = ", ".join(map(self._describe, self.feed.features, inputs))
        outputs = _call(
            lambda: model(*inputs),
            f"the model fails with a batch of {fed}",
            "Give the columns the shapes that it takes with input_shapes, name columns of "
            "category indices in categorical_cols, or change the model",
        )
        if outputs is None:
            return
        names = ", ".join(self.feed.labels)
        pairs = _call(
            lambda: transform_outputs(outputs, given),
            f"the outputs of the model do not fit the label(s) {names}",
            "The model returns one tensor for each of label_cols, in their order",
        )
        if pairs is None:
            return
        for index, (name, output, label) in enumerate(zip(self.feed.labels, *pairs, strict=True)):
            found = f"{self._describe(name, label)} and an output {_text(output)}"
            wants_integers = (
                f"It wants whole numbers: df.withColumn({name!r}, df[{name!r}].cast('long')) makes "
                "them"
            )
            for what, function in (
                ("loss", objective.functions[index]),
                *(("metric", group[index]) for group in objective.metrics),
            ):
                _call(
                    functools.partial(function, output, label),
                    f"the {what} fails with the label {found}",
                    "Change label_shapes, the loss or the model",
                    wants_integers if label.is_floating_point() else "",
                )

    def _describe(self, name: str, tensor: torch.Tensor) -> str:
        return f"{name!r} (column of type {self.kinds[name]}, {_text(tensor)})"


def _call(function: Callable[[], Any], failure: str, advice: str, wants_integers: str = "") -> Any:
    """Call a function and return its result; ColumnError if it fails and the data is to blame.

    Return None if it fails for another reason. `wants_integers` is the advice if it names them.
    """
    try:
        return function()
    except _WRONG_DATA as error:
        words = " ".join(str(error).split())
        if _ELSEWHERE.search(words) or isinstance(error, NotImplementedError):
            logger.debug("the trial on the driver says nothing: %s", words)
            return None
        if wants_integers and _WANTS_INTEGERS.search(words):
            advice = wants_integers
        raise ColumnError(
            f"{failure}: {type(error).__name__}: {words}. {advice}. Nothing was started"
        ) from error
    except Exception as error:
        logger.debug("the trial on the driver says nothing: %r", error)
        return None


def _text(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"of type {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _repeated(rows: Rows, count: int) -> Rows:
    """Repeat the rows until there are `count`."""
    return {name: np.take(array, np.arange(count) % len(array), 0) for name, array in rows.items()}
