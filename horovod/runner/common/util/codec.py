"""Objects as text, for programs that pass them through environment variables or files.

Whoever can write such a text can run code where it is read: use it only for what you wrote.
"""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """An object pickled, in base64: text, or bytes without `to_ascii`."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object of `dumps_base64`."""
    return cloudpickle.loads(base64.b64decode(encoded))
