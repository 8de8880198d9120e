"""One knob: an environment variable of Horovod, and how its text becomes a value.

`config` declares all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "HOROVOD_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Knob:
    """One row of the table of knobs."""

    name: str
    type: type
    optional: bool
    default: Any
    section: str
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]

    @functools.cached_property
    def env(self) -> str:
        """The name of the environment variable."""
        return PREFIX + self.name.upper()

    def read(self, environ: Mapping[str, str]) -> Any:
        """Return the knob's value in an environment: its default where that does not set it.

        Args:
            environ: The variables.

        Raises:
            ValueError: The variable has a value that cannot be understood, or is out of bounds.
        """
        text = environ.get(self.env, "").strip()
        return self.parse(text) if text else self.default

    def parse(self, text: str) -> Any:
        """Return the value that `text` stands for.

        Args:
            text: The value of the variable, not empty.

        Raises:
            ValueError: The text is not of the knob's type, or the value is out of bounds. The
                message names the variable.
        """
        try:
            value = _PARSERS[self.type](text)
        except ValueError:
            raise ValueError(f"{self.env}={text!r} is not {_KINDS[self.type]}") from None
        if self.choices:
            value = value.lower()
            if value not in self.choices:
                if self.name == "log_level":  # upstream's rule: a bad level must not end a job
                    return self.default
                expected = ", ".join(self.choices)
                raise ValueError(f"{self.env}={text!r} is not one of {expected}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.env}={text} is below the least allowed value {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.env}={text} is above the greatest value {self.maximum:g}")
        return value


def _parse_bool(text: str) -> bool:
    """Return whether a text means yes; as in upstream, so does any number above 0."""
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    return int(text) > 0


def _parse_float(text: str) -> float:
    """Return a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: dict[type, Any] = {bool: _parse_bool, int: int, float: _parse_float, str: str}
_KINDS = {bool: "a yes or no (1 or 0)", int: "a whole number", float: "a number", str: "text"}
