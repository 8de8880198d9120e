"""Describe what torch.compile has done on each rank, for errors about ranks that differ.

A rank whose code was compiled anew may run other collectives than the others, or in another order.
Nothing is counted here: torch's own counters are read when an error is made.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

_RANKS_SHOWN = 6


def graph_count() -> int:
    """Return how many graphs torch.compile has made in this process."""
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:  # the compiler was never loaded
        return 0
    return int(utilities.counters["stats"]["unique_graphs"])


def difference_hint(counts: Mapping[int, int]) -> str:
    """Return what to add to an error about ranks that differ, or nothing.

    Args:
        counts: How many graphs each rank has, by its number in the job.
    """
    if len(set(counts.values())) < 2:
        return ""
    return (
        f". torch.compile has made {_listed(counts)}: where one rank compiled its code anew, the "
        "new graph may have other collectives, or another order of them. Let the shapes and "
        "conditions that lead to collectives be the same on all ranks, or call the collectives "
        "outside of compiled code"
    )


def waiting_hint(counts: Mapping[int, int]) -> str:
    """Return what to add to a report of ranks that wait in compiled programs, or nothing.

    Args:
        counts: How many graphs each waiting rank has, by its number in the job.
    """
    if not any(counts.values()):
        return ""
    return (
        f"torch.compile has made {_listed(counts)}. A missing rank may be compiling, or may have "
        "compiled code that skips these operations."
    )


def _listed(counts: Mapping[int, int]) -> str:
    """Return "3 graphs on rank 0 and 4 on rank 1", ranks with the same number together."""
    ranks: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        ranks.setdefault(count, []).append(rank)
    parts = []
    for index, (count, alike) in enumerate(ranks.items()):
        graphs = "" if index else " graph" if count == 1 else " graphs"
        more = " ..." if len(alike) > _RANKS_SHOWN else ""
        named = ", ".join(map(str, alike[:_RANKS_SHOWN]))
        parts.append(f"{count}{graphs} on rank {named}{more}")
    return " and ".join(parts)
