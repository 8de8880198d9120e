"""What a job may leave behind on its machine; tests look here after a crash."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil

from tests.ranks import Ranks


@contextmanager
def private_temporary_folder() -> Iterator[str]:
    """A folder to be the ranks' TMPDIR. Its path is short: a socket's name is limited."""
    folder = tempfile.mkdtemp(prefix="hvd-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def files_in(folder: str) -> list[str]:
    return [
        os.path.join(where, name) for where, dirs, files in os.walk(folder) for name in dirs + files
    ]


def named_shared_memory(pids: Iterable[int]) -> set[str]:
    """Files of /dev/shm that these processes have mapped or open."""
    found = set()
    for pid in pids:
        with open(f"/proc/{pid}/maps") as maps:
            found.update(line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line)
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except FileNotFoundError:
                continue  # closed since
            if target.startswith("/dev/shm/"):
                found.add(target)
    return found


def descendants(ranks: Ranks) -> list[psutil.Process]:
    """Every process of the job."""
    roots = [psutil.Process(pid) for pid in ranks.pids]
    return roots + [child for root in roots for child in root.children(recursive=True)]


def still_running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end by themselves soon."""
    _, alive = psutil.wait_procs(list(processes), timeout=100)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
