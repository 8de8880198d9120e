"""Hosts whose ranks outnumber their cores: one sentence about all of them, for the page.

`board` asks. On such a host ranks take turns, so that the times of single ranks say little:
`stragglers` is less sensitive there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from horovod.runner.dashboard.rank import Rank

_NAMED_HOSTS = 3


@dataclass(frozen=True)
class CrowdedHost:
    """A host with more ranks than cores."""

    host: str
    ranks: int
    cores: int


def find_crowded(ranks: Iterable[Rank]) -> list[CrowdedHost]:
    """The hosts whose ranks outnumber the cores that these may use.

    Nothing is said of a host before all of its ranks have reported: each may be bound to a core of
    its own.
    """
    reported: dict[str, list[frozenset[int]]] = {}
    for rank in ranks:
        cores = rank.report.cores if rank.report is not None else frozenset()
        reported.setdefault(rank.host, []).append(cores)
    return [
        CrowdedHost(host, len(each), len(frozenset().union(*each)))
        for host, each in reported.items()
        if all(each) and len(frozenset().union(*each)) < len(each)
    ]


def describe_crowded(crowded: list[CrowdedHost], hosts: int) -> str:
    """One sentence about all hosts that are crowded; empty where none is."""
    if not crowded:
        return ""
    alike = {(each.ranks, each.cores) for each in crowded}
    names = [each.host for each in crowded]
    if len(alike) == 1:
        ranks, cores = next(iter(alike))
        many = f"{ranks} ranks share {_count(cores)}"
        if hosts == 1:
            return many
        if len(names) > _NAMED_HOSTS:
            return f"{many} on each of {len(names)} hosts"
        return f"{many} on {', '.join(names)}"
    shown = [
        f"{each.ranks} ranks share {_count(each.cores)} on {each.host}"
        for each in crowded[:_NAMED_HOSTS]
    ]
    more = len(crowded) - len(shown)
    return ", ".join(shown) + (f", and {more} more hosts are alike" if more else "")


def _count(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"
