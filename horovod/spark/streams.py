"""Write the output of workers on Spark to this process's streams, or to given ones.

Notebooks replace ``sys.stdout`` by an object without a descriptor, so this console writes text.
"""

from __future__ import annotations

import sys
from typing import Any

from horovod.runner.api import Colour, Console


class StreamConsole(Console):
    """A console that writes to objects with a ``write`` method, of text or of bytes."""

    def __init__(self, stdout: Any, stderr: Any, *, timestamps: bool, quiet: bool) -> None:
        super().__init__(timestamps=timestamps, speaker="horovod.spark")
        self._terminals = set()
        self._coloured = set()
        self._streams: dict[str, Any] = {
            "stdout": sys.stdout if stdout is None else stdout,
            "stderr": sys.stderr if stderr is None else stderr,
        }
        self._files = {name: id(stream) for name, stream in self._streams.items()}
        self._quiet = quiet

    def say(self, text: str, colour: Colour = Colour.PLAIN) -> None:
        if not self._quiet:
            super().say(text, colour)

    def _put(self, stream: str, data: bytes) -> None:
        target = self._streams[stream]
        if not data or stream in self._lost:
            return
        try:
            try:
                target.write(data.decode(errors="replace"))
            except TypeError:  # a file of bytes
                target.write(data)
            if hasattr(target, "flush"):
                target.flush()
        except BrokenPipeError:
            self._lost.add(stream)
