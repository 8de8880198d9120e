"""Times and sizes as people write them. Used by `advice`, `text` and `page`."""

from __future__ import annotations


def milliseconds(time: float) -> str:
    """Of microseconds."""
    value = time / 1000
    if abs(value) >= 100:
        return f"{value:.0f} ms"
    return f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.2f} ms"


def size_of(nbytes: float | None) -> str:
    if nbytes is None:
        return "?"
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB" if nbytes >= 1024 else f"{nbytes:.0f} B"


def shortened(names: tuple[str, ...], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
