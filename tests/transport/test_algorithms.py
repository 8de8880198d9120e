"""Transports that can reduce in several ways do so rightly after each change to another."""

from __future__ import annotations

import pytest

from horovod.common.store import MemoryStore
from horovod.transport.base import SingleTransport
from tests.ranks import run_ranks
from tests.transport import cases
from tests.transport.kinds import KINDS, build, connect, whole_group

CHOICES = {
    "shm": ("direct", "staged"),
    "hierarchical, shm, 2+1": ("hierarchical", "flat"),
    "hierarchical switched off": ("flat", "hierarchical"),
}


def _switch(rank: int, size: int, kind: str, names: tuple[str, ...]) -> list[str]:
    transport = build(kind, rank, connect())
    assert transport.algorithms == names
    digests = []
    for turn, name in enumerate([*names, *names]):
        transport.use(name)
        for count in (5, 70_000):
            counts = [count + place for place in range(size)]
            words = tuple((turn, place) for place in range(size))
            for case in (
                cases.Case("agree", words=words, preloads=(count,) * size, seed=turn),
                cases.Case("allreduce", counts=count, seed=turn),
                cases.Case("allreduce_vector", counts=[7, 12 * count, count], seed=turn),
                cases.Case("reduce_scatter", counts=counts, seed=turn),
                cases.Case("allgather", counts=counts, seed=turn),
                cases.Case("broadcast", counts=count, root=1, seed=turn),
            ):
                digests.append(cases.run(transport, case))
    transport.close()
    return digests


@pytest.mark.parametrize("kind", CHOICES)
def test_switching(kind: str):
    digests = run_ranks(_switch, KINDS[kind].size, kind, CHOICES[kind])
    assert all(mine == digests[0] for mine in digests), "the ranks have different bits"


def test_no_choice():
    transport = SingleTransport(whole_group(0, 1, MemoryStore()))
    assert transport.algorithms == ()
    with pytest.raises(ValueError, match="no choice"):
        transport.use("direct")
