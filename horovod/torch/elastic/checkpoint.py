"""Commits on disk, which survive even the loss of all workers, or of the driver.

Used by `TorchState(checkpoint_dir=...)`. Rank 0 writes, in a thread of its own that training never
waits for: a commit that comes while the writer is busy waits, and replaces one that waits already.
A file appears under its name only when it is complete and on disk. Files hold tensors and plain
Python values only and are read with ``weights_only``, so a foreign file cannot run code here.

A file has the number of its commit, which counts on from job to job and is the same on all ranks.
So a former rank 0 that was stopped and given up, and wakes up with something to write, cannot
replace what the others have committed since.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from horovod.common.logging import get_logger
from horovod.torch.elastic.snapshot import Snapshot

logger = get_logger(__name__)

_NAME = re.compile(r"commit-(\d+)\.pt")
_UNFINISHED = re.compile(r"unfinished-(\d+)-\d+\.tmp")
_FORMAT = 1
_LAST_WORDS = 300.0  # seconds that the end of the process waits for what is not on disk yet

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.Tensor, torch.dtype)


def not_plain(value: Any, name: str) -> str | None:
    """Return what in `value` a checkpoint cannot hold; None if it can hold all of it."""
    if isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        parts += [(f"a key of {name}", key) for key in value]
    elif type(value) in (list, tuple, set, torch.Size):
        parts = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None if type(value) in _PLAIN else f"{name} is a {type(value).__name__}"
    return next(filter(None, (not_plain(item, part) for part, item in parts)), None)


class CheckpointWriter:
    """Writes the newest commit that it is given into `directory`; the last `keep` files stay."""

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}")
        self._directory = Path(directory)
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: tuple[int, dict[str, Any], Sequence[Snapshot]] | None = None
        self._busy = False
        self._thread: threading.Thread | None = None

    def submit(self, number: int, content: dict[str, Any], snapshots: Sequence[Snapshot]) -> None:
        """Write commit `number`, made of `snapshots`, which are held until that is done."""
        for snapshot in snapshots:
            snapshot.hold()  # before the writer's thread can release it
        with self._changed:
            replaced, self._waiting = self._waiting, (number, content, snapshots)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="horovod-checkpoints", daemon=True
                )
                self._thread.start()
                atexit.register(self.flush)
            self._changed.notify_all()
        for snapshot in replaced[2] if replaced is not None else ():
            snapshot.release()

    def flush(self, timeout: float = _LAST_WORDS) -> bool:
        """Wait at most `timeout` seconds until everything is on disk; return whether it is."""
        with self._changed:
            done = self._changed.wait_for(lambda: not (self._waiting or self._busy), timeout)
        if not done:
            logger.error("the last commit is not on disk: writing took over %g s", timeout)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                assert self._waiting is not None
                number, content, snapshots = self._waiting
                self._waiting, self._busy = None, True
            try:
                self._write(number, content)
            except Exception as error:  # a full disk must not end the training
                logger.error("cannot write a checkpoint into %s: %s", self._directory, error)
            finally:
                for snapshot in snapshots:
                    snapshot.release()
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _write(self, number: int, content: dict[str, Any]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        newest = newest_number(self._directory)
        if newest >= number:
            logger.warning(
                "not writing commit %d into %s: %d is there already",
                number,
                self._directory,
                newest,
            )
            return
        unfinished = self._directory / f"unfinished-{number}-{os.getpid()}.tmp"
        try:
            with open(unfinished, "wb") as file:
                torch.save({"format": _FORMAT, **content}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, _path(self._directory, number))
        finally:
            unfinished.unlink(missing_ok=True)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name, too, has to be on disk
        finally:
            os.close(directory)
        for old in _numbers(self._directory)[self._keep :]:
            _path(self._directory, old).unlink(missing_ok=True)
        for name in os.listdir(self._directory):
            left_over = _UNFINISHED.fullmatch(name)
            if left_over and int(left_over[1]) <= number:  # of a writer that was killed
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()


def newest_checkpoint(directory: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest file that can be read, and its content; files that cannot are skipped."""
    folder = Path(directory)
    for number in _numbers(folder):
        path = _path(folder, number)
        try:
            with zipfile.ZipFile(path) as parts:  # torch writes check sums but does not read them
                damaged = parts.testzip()
            if damaged is not None:
                raise ValueError(f"{damaged} in it is damaged")
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content["format"] != _FORMAT:
                raise ValueError(f"it has format {content['format']}, not {_FORMAT}")
            return path, content
        except Exception as error:  # zip files, pickles and disks fail in many ways
            logger.warning("skipping the checkpoint %s: %s", path, error)
    return None


def newest_number(directory: str | os.PathLike[str]) -> int:
    """Return the newest checkpoint's number, even if it cannot be read; -1 if there is none."""
    return next(iter(_numbers(Path(directory))), -1)


def _numbers(directory: Path) -> list[int]:
    """Return the numbers of the checkpoints in `directory`, newest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    matches = [_NAME.fullmatch(name) for name in names]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _path(directory: Path, number: int) -> Path:
    return directory / f"commit-{number}.pt"
