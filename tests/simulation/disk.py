"""A disk that all hosts of a simulated cluster share, and that forgets what was not synced.

Files are real ones in a temporary folder. What `os.fsync` was called for is remembered: a file's
content, a folder's names. After a power loss everything else may be gone.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from random import Random


class Disk:
    """One folder for commits."""

    def __init__(self, random: Random) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="horovod-simulated-disk-"))
        self._random = random
        self._synced: dict[int, bytes] = {}  # contents, by inode
        self._names: dict[str, int] = {}  # inodes, by name

    def sync(self, descriptor: int) -> None:
        """Do what `os.fsync` does, with a file or the folder."""
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._names = self._list()
        else:
            self._synced[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def lose_power(self) -> None:
        """Forget what was not synced: new names or old ones, and the ends of files."""
        present, left = self._list(), {}
        for name in sorted({*present, *self._names}):
            inode = self._random.choice([self._names.get(name), present.get(name)])
            if inode in self._synced:
                left[name] = self._synced[inode]
            elif inode is not None:
                data = (self.path / name).read_bytes() if name in present else b""
                left[name] = data[: self._random.randrange(len(data) + 1)]
        for name in present:
            (self.path / name).unlink()
        for name, data in left.items():
            (self.path / name).write_bytes(data)
        self._names = self._list()
        self._synced = {inode: left[name] for name, inode in self._names.items()}

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def _list(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self.path.iterdir()}
