"""Snapshots in memory and on disk."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod.torch.elastic import checkpoint
from horovod.torch.elastic.checkpoint import CheckpointWriter, newest_checkpoint, not_plain
from horovod.torch.elastic.snapshot import Snapshot, Snapshots, clone


def _pointers(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [value.data_ptr()]
    if isinstance(value, dict):
        value = list(value.values())
    return [p for item in value for p in _pointers(item)] if isinstance(value, list) else []


def _content(snapshots: Snapshots) -> Any:
    assert snapshots.current is not None
    return snapshots.current.content


def test_a_snapshot_shares_nothing_with_the_value():
    inner = torch.ones(3)
    value = {"a": inner, "b": [torch.zeros(2), {"c": (1, "x")}], "options": {"lr": 0.1}}
    snapshots = Snapshots()
    snapshots.take(value)
    inner.fill_(7)
    value["options"]["lr"] = 0.5
    content = _content(snapshots)
    assert content["a"].tolist() == [1, 1, 1]
    assert content["b"][1] == {"c": (1, "x")}
    assert content["options"] == {"lr": 0.1}


def test_memory_is_allocated_twice_and_then_reused():
    tensor = torch.zeros(1000)
    snapshots, used = Snapshots(), []
    for step in range(6):
        tensor.fill_(step)
        snapshots.take({"t": tensor, "list": [tensor]})
        assert _content(snapshots)["t"][0] == step
        used.append(tuple(_pointers(_content(snapshots))))
    assert used[2:] == used[:2] * 2
    snapshots.take({"t": torch.zeros(3), "list": [tensor]})  # fits only in part
    assert _content(snapshots)["t"].shape == (3,)
    assert _pointers(_content(snapshots))[1] == used[0][1]


def test_a_snapshot_that_fails_leaves_the_one_before():
    class Broken:
        def __deepcopy__(self, memo: Any) -> Any:
            raise MemoryError("no more")

    tensor = torch.zeros(4)
    snapshots = Snapshots()
    for step in (1, 2):
        tensor.fill_(step)
        snapshots.take({"t": tensor})
    tensor.fill_(3)
    with pytest.raises(MemoryError):
        snapshots.take({"t": tensor, "b": Broken()})
    assert _content(snapshots)["t"].tolist() == [2] * 4
    snapshots.take({"t": tensor})
    assert _content(snapshots)["t"].tolist() == [3] * 4


def test_what_somebody_reads_is_not_overwritten():
    tensor = torch.zeros(4)
    snapshots = Snapshots()
    snapshots.take([tensor])
    held = snapshots.current
    assert held is not None
    held.hold()
    for step in range(1, 4):
        tensor.fill_(step)
        snapshots.take([tensor])
    assert held.content[0].tolist() == [0] * 4
    held.release()
    snapshots.take([tensor])
    snapshots.take([tensor])
    assert held.content[0].tolist() == [3] * 4


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([1.0, 0.0, 2.0]).to_sparse(),
        torch.tensor(3),
        torch.empty(0, 2),
        torch.ones(3, requires_grad=True),
        torch.ones(2, dtype=torch.bfloat16),
    ],
)
def test_all_kinds_of_tensors(value: torch.Tensor):
    snapshots = Snapshots()
    for _ in range(3):
        snapshots.take([value])
        (copied,) = _content(snapshots)
        assert copied.dtype == value.dtype
        assert not copied.requires_grad
        same = copied.to_dense(), value.detach().to_dense()
        assert torch.equal(*same)


def measure_snapshot(num_bytes: int = 100_000_000, repetitions: int = 5) -> float:
    """How many times the cost of a bare copy of the same bytes a snapshot takes (medians)."""
    parts = {f"p{i}": torch.randn(num_bytes // 4 // 50) for i in range(50)}
    target = {name: torch.empty_like(tensor) for name, tensor in parts.items()}
    snapshots = Snapshots()
    for _ in range(2):
        snapshots.take(parts)
    copies, takes = [], []
    for _ in range(repetitions):
        began = time.perf_counter()
        for name, tensor in parts.items():
            target[name].copy_(tensor)
        middle = time.perf_counter()
        snapshots.take(parts)
        copies.append(middle - began)
        takes.append(time.perf_counter() - middle)
    return sorted(takes)[repetitions // 2] / sorted(copies)[repetitions // 2]


def test_a_snapshot_costs_about_one_copy():
    ratio = min(measure_snapshot() for _ in range(3))
    print(f"snapshot / memcpy: {ratio:.2f}")
    assert ratio < 4


# -- on disk -------------------------------------------------------------------------------------


def _write(writer: CheckpointWriter, number: int) -> None:
    writer.submit(number, {"values": {"t": torch.full((1000,), number)}}, [])
    assert writer.flush(200)


def _read(directory: Path) -> int | None:
    found = newest_checkpoint(directory)
    return None if found is None else int(found[1]["values"]["t"][0])


def test_the_newest_is_read_and_the_last_are_kept(tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    assert _read(folder) is None
    writer = CheckpointWriter(folder, keep=2)
    for number in range(5):
        _write(writer, number)
        assert _read(folder) == number
    assert sorted(os.listdir(folder)) == ["commit-3.pt", "commit-4.pt"]
    _write(CheckpointWriter(folder, keep=2), 7)  # of the next job
    assert sorted(os.listdir(folder)) == ["commit-4.pt", "commit-7.pt"]
    _write(writer, 6)  # of one that was asleep
    assert sorted(os.listdir(folder)) == ["commit-4.pt", "commit-7.pt"]
    with pytest.raises(ValueError, match="at least one"):
        CheckpointWriter(folder, keep=0)


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign", "dangerous"])
def test_damaged_files_are_skipped(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture):
    writer = CheckpointWriter(tmp_path, keep=3)
    for number in (1, 2):
        _write(writer, number)
    newest = tmp_path / "commit-2.pt"
    content = newest.read_bytes()
    if damage == "truncated":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        newest.write_bytes(b"")
    elif damage == "flipped":
        at = content.index(torch.full((1000,), 2).numpy().tobytes()) + 500
        newest.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    elif damage == "foreign":
        torch.save({"something": 1}, newest)
    else:
        torch.save({"format": 1, "values": Path}, newest)
    (tmp_path / "unfinished-3-9.tmp").write_bytes(b"half")
    (tmp_path / "unfinished-9-9.tmp").write_bytes(b"somebody is at it")
    (tmp_path / "commit-x.pt").write_bytes(b"not ours")
    assert _read(tmp_path) == 1
    assert str(newest) in caplog.text
    _write(writer, 3)
    assert _read(tmp_path) == 3
    assert [path.name for path in tmp_path.glob("unfinished*")] == ["unfinished-9-9.tmp"]


def test_a_busy_writer_takes_the_newest_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def save(content: Any, file: Any) -> None:
        begun.set()
        assert go_on.wait(200)
        written.append(content["values"])

    monkeypatch.setattr(checkpoint.torch, "save", save)
    writer = CheckpointWriter(tmp_path, keep=1)
    snapshots = [Snapshot(number) for number in range(4)]
    writer.submit(0, {"values": 0}, snapshots[:1])
    assert begun.wait(200)
    for number in (1, 2, 3):
        writer.submit(number, {"values": number}, [snapshots[number]])
    assert [snapshot.is_held for snapshot in snapshots] == [True, False, False, True]
    assert not writer.flush(0.01)
    go_on.set()
    assert writer.flush(200)
    assert written == [0, 3]
    assert not any(snapshot.is_held for snapshot in snapshots)


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(tmp_path / "file", keep=1)
    _write(writer, 1)
    assert "cannot write a checkpoint" in caplog.text


def test_what_a_checkpoint_can_hold():
    plain = {"a": [1, 2.0, (None, "x", b"y")], "b": torch.ones(1), 3: {"c": True}}
    assert not_plain(plain, "state") is None
    assert not_plain({"a": [1, Path()]}, "state") == "state['a'][1] is a PosixPath"
    assert clone(plain)["a"] == plain["a"]
