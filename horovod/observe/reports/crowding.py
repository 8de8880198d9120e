"""Find hosts whose ranks outnumber their cores, so that ranks take turns.

The times of single ranks say little on such a host. Used by the live page and by `rank_advice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from horovod.observe.reports.amounts import count_of

_NAMED_HOSTS = 3


class HostLoad(NamedTuple):
    """The number of ranks on a host, and of the cores that they may use together."""

    host: str
    ranks: int
    cores: int


def count_ranks_and_cores(
    hosts: Mapping[int, str], cores: Mapping[int, frozenset[int]]
) -> list[HostLoad]:
    """Count the ranks of each host, and the cores that they may use.

    Args:
        hosts: The host of each rank.
        cores: The numbers of the cores that each rank may use, if known. A host counts only if
            those of all its ranks are known, as each may be bound to a core of its own.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        ranks_of.setdefault(host, []).append(rank)
    return [
        HostLoad(host, len(ranks), len(frozenset().union(*(cores[rank] for rank in ranks))))
        for host, ranks in ranks_of.items()
        if all(cores.get(rank) for rank in ranks)
    ]


def find_crowded(hosts: Mapping[int, str], cores: Mapping[int, frozenset[int]]) -> list[HostLoad]:
    """Return the hosts with more ranks than cores; arguments as in `count_ranks_and_cores`."""
    return [each for each in count_ranks_and_cores(hosts, cores) if each.ranks > each.cores]


def describe_crowded(crowded: Sequence[HostLoad], num_hosts: int) -> str:
    """Return one sentence about all crowded hosts; empty if there is none."""
    if not crowded:
        return ""
    alike = {(each.ranks, each.cores) for each in crowded}
    names = [each.host for each in crowded]
    if len(alike) == 1:
        ranks, cores = next(iter(alike))
        many = f"{ranks} ranks share {count_of(cores, 'core')}"
        if num_hosts == 1:
            return many
        if len(names) > _NAMED_HOSTS:
            return f"{many} on each of {len(names)} hosts"
        return f"{many} on {', '.join(names)}"
    shown = [
        f"{each.ranks} ranks share {count_of(each.cores, 'core')} on {each.host}"
        for each in crowded[:_NAMED_HOSTS]
    ]
    more = len(crowded) - len(shown)
    return ", ".join(shown) + (f", and {more} more hosts are alike" if more else "")
