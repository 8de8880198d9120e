"""Write times, sizes, numbers, lists and tables as people do, for reports and messages."""

from __future__ import annotations

from collections.abc import Sequence


def milliseconds(time: float) -> str:
    """Return a time in microseconds as milliseconds."""
    value = time / 1000
    if abs(value) >= 100:
        return f"{value:.0f} ms"
    return f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.2f} ms"


def size_of(nbytes: float | None) -> str:
    """Return a number of bytes with a unit; "?" if it is unknown."""
    if nbytes is None:
        return "?"
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB" if nbytes >= 1024 else f"{nbytes:.0f} B"


def time_of(time: float) -> str:
    """Return a time in microseconds as seconds, or as milliseconds if it is short."""
    if time < 1e6:
        return milliseconds(time)
    return f"{time / 1e6:.1f} s" if time < 1e7 else f"{time / 1e6:.0f} s"


def percent(part: float, whole: float) -> str:
    """Return a part of a whole in per cent."""
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def ranks_named(ranks: Sequence[int]) -> str:
    """Return a text such as "rank 2" or "ranks 2, 3 and 5"; of many ranks, the first few."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {join_words(list(map(str, ranks)), 5 if len(ranks) > 6 else None)}"


def ordinal(number: int) -> str:
    """Return a text such as "10th" or "3rd"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def count_of(number: int | None, noun: str) -> str:
    """Return a number and a noun, such as ``1 worker`` or ``3 workers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def join_words(words: Sequence[str], most: int | None = None) -> str:
    """Return ``a, b and c``; of more words than ``most``, the first ones and how many are left."""
    if most is not None and len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row of a table, with equally wide cells in each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
