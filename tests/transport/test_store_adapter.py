"""Our store, as torch's process groups see it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed

from horovod.common.store import MemoryStore
from horovod.transport.device.store_adapter import StoreForTorch


def test_torch_sees_what_we_store_and_the_other_way_round() -> None:
    ours = MemoryStore()
    adapter = StoreForTorch(ours, timeout=60)  # torch does not keep the Python object alive
    theirs = torch.distributed.PrefixStore("group", adapter)
    theirs.set("a", "text")
    assert ours.get("group/a", 0) == b"text"
    ours.set("group/b", b"\x00\xff")
    assert theirs.get("b") == b"\x00\xff"
    assert theirs.add("n", 2) == 2
    assert theirs.add("n", 3) == 5
    assert theirs.check(["a", "b"])
    assert not theirs.check(["a", "c"])
    assert theirs.delete_key("a")
    assert not theirs.check(["a"])
    assert theirs.num_keys() == 2


def test_waiting_ends_when_the_key_comes() -> None:
    ours = MemoryStore()
    store = StoreForTorch(ours, timeout=60)
    threading.Timer(0.05, ours.set, ["late", b"1"]).start()
    store.wait(["late"])
    assert store.get("late") == b"1"


def test_waiting_ends_with_the_deadline_of_all_calls() -> None:
    store = StoreForTorch(MemoryStore(), timeout=0.05)
    with pytest.raises(TimeoutError, match="never"):
        store.wait(["never"], timedelta(seconds=60))
    with pytest.raises(TimeoutError, match="never"):
        store.get("never")
