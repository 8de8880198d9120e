"""Read the style sheet that the report's page and the live page put into their HTML."""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def style_sheet() -> str:
    """Return the style sheet, with its colours for light and dark."""
    return resources.files(__package__).joinpath("style.css").read_text("utf-8")
