"""Looking through files that others write and remove meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def contents(top: str | Path) -> dict[Path, bytes]:
    """What is in all files below a folder; one that is removed just now is left out."""
    found = {}
    for folder, _, names in os.walk(top):
        for path in (Path(folder, name) for name in names):
            try:
                if path.is_file():  # no socket
                    found[path] = path.read_bytes()
            except FileNotFoundError:
                continue
    return found
