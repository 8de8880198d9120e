"""Whether the record of options has a field for each argument of a public function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from horovod.common.optimizer_options import OptimizerOptions


def not_in(record: type[OptimizerOptions], function: Callable[..., Any]) -> set[str]:
    """The arguments that `OptimizerOptions.from_arguments` would leave out."""
    known = {field.name for field in (*fields(record), *fields(type(record.schedule)))}
    return set(inspect.signature(function).parameters) - known - {"schedule", "num_groups"}
