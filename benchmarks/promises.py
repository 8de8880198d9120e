"""What the benchmarks that guard promises have in common: their beginning and their end."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Requirement:
    """One promise of the project and how this run fared: None where it was not measured."""

    text: str
    met: bool | None
    found: str


def times_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """What each of them can be asked."""
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a promise is missed or not measured"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).resolve().parent / "results",
        metavar="DIR",
        help=f"where {name}.csv and {name}.png go (benchmarks/results)",
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with columns as wide as they must be."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


@contextmanager
def figure(path: Path, rows: int, columns: int, **how: Any) -> Iterator[Any]:
    """Panels to draw in, of which `path` keeps the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (6.2 * columns, 4.6 * rows)
    drawn, panels = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **how)
    yield panels
    drawn.tight_layout()
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def warn_if_busy() -> None:
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"The machine is not idle (load {busy:.1f}): do not trust these numbers too far.")


def write_files(
    name: str, folder: Path, csv: Callable[[Path], None], plot: Callable[[Path], None]
) -> None:
    """Leave NAME.csv in `folder`, and NAME.png where it can be drawn; say so."""
    folder.mkdir(parents=True, exist_ok=True)
    csv(folder / f"{name}.csv")
    print(f"Written: {folder / f'{name}.csv'}")
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: matplotlib is not installed (pip install matplotlib).")
    else:
        plot(folder / f"{name}.png")
        print(f"Written: {folder / f'{name}.png'}")
    print()


def all_met(requirements: Iterable[Requirement]) -> bool:
    """Print every promise with what became of it."""
    met = True
    for requirement in requirements:
        word = {True: "met", False: "MISSED", None: "-"}[requirement.met]
        print(f"{word:>7}  {requirement.text}: {requirement.found}")
        met &= requirement.met is True
    return met
