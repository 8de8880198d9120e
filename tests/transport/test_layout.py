"""How tensors are divided, and what a composed transport refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from horovod.common.store import MemoryStore
from horovod.transport.base import SingleTransport
from horovod.transport.device.host_copy import HostCopyTransport
from horovod.transport.division import offsets_of, split_evenly
from tests.transport.kinds import whole_group

ONE = whole_group(0, 1, MemoryStore())
TWO = replace(ONE, size=2, global_ranks=(0, 1))


def test_slices() -> None:
    assert split_evenly(11, 4) == [3, 3, 3, 2]
    assert split_evenly(0, 2) == [0, 0]
    assert offsets_of([3, 0, 2]) == [0, 3, 3]


def test_staged_needs_a_host_transport_of_the_same_ranks() -> None:
    with pytest.raises(ValueError, match="other ranks"):
        HostCopyTransport(TWO, SingleTransport(ONE))
