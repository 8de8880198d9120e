"""What benchmarks of a framework's training step have in common (`jax.py`, `mxnet.py`).

Contenders have ranks of their own, which take the same steps when told to and answer with the
seconds of one and the loss of the last.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median

from benchmarks.processes import Commands, Group, group
from benchmarks.promises import Requirement, aligned, figure
from benchmarks.turns import Pairs, Samples, interval, race, ratios

OURS = "ours"
CLOSE = 1e-3  # the most that losses may differ, relatively

# Starts what a contender needs besides its ranks, and gives the commands of those.
Start = Callable[[str, Path], AbstractContextManager[Commands]]


def measure(
    contenders: Sequence[str], start: Start, pairs: Pairs, seconds: float
) -> tuple[Samples, dict[str, float]]:
    """Seconds per step of every contender's turns, and the loss after its first turn."""
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="horovod-bench-")))
        groups: dict[str, Group] = {}
        losses = {}
        for name in contenders:
            commands = running.enter_context(start(name, folder))
            groups[name] = running.enter_context(group(commands, folder / name))
            answers = groups[name].ask("train")  # compiles
            losses[name] = sum(answer["loss"] for answer in answers) / len(answers)
        turns = {
            name: (lambda members=members: max(a["seconds"] for a in members.ask("train")))
            for name, members in groups.items()
        }
        return race(turns, pairs, seconds), losses


def table(title: str, contenders: Mapping[str, str], samples: Samples) -> str:
    """Rows of contenders, whose titles are given, and how many times as fast we are."""
    rows = [("", "ms/step", "steps/s", f"{contenders[OURS]} is")]
    for name, text in contenders.items():
        step, ratio = median(samples[name]), ""
        if name != OURS:
            found = ratios(samples, name, OURS)
            low, high = interval(found)
            ratio = f"{median(found):.2f}x as fast ({low:.2f} to {high:.2f})"
        rows.append((text, f"{1000 * step:.2f}", f"{1 / step:.1f}", ratio))
    return "\n".join([f"{title}, {len(samples[OURS])} rounds", *aligned(rows)])


def requirements(
    what: str, peer: str, wanted: float, samples: Samples, losses: Mapping[str, float]
) -> Iterator[Requirement]:
    """That we are `wanted` times as fast as a contender, and come to its loss."""
    ratio = median(ratios(samples, peer, OURS))
    yield Requirement(what, ratio >= wanted, f"{ratio:.2f}x")
    ours, theirs = losses[OURS], losses[peer]
    same = abs(ours - theirs) <= CLOSE * abs(theirs)
    yield Requirement(f"{what}, with the same loss", same, f"{ours:.6f} and {theirs:.6f}")


def write_csv(found: Mapping[str, Samples], path: Path) -> None:
    """The samples of every model."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "contender", "round", "seconds_per_step"])
        for model, samples in found.items():
            for name, seconds in samples.items():
                rows.writerows([model, name, number, each] for number, each in enumerate(seconds))


def write_plot(found: Mapping[str, Samples], titles: Mapping[str, str], path: Path) -> None:
    with figure(path, 1, len(found)) as panels:
        for panel, (model, samples) in zip(panels[0], found.items(), strict=True):
            panel.bar(list(samples), [1 / median(seconds) for seconds in samples.values()])
            panel.set_title(titles[model])
            panel.set_ylabel("steps per second")
