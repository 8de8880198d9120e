"""A program whose rank 1 fails while the others wait for it, in one of the ways of `WAYS`.

    losing_rank.py raise|3|0 [FOLDER]

With a folder, rank 1 ends after rank 0 has: its process stays until that of rank 0 is gone.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

WAYS = ("raise", "3", "0")
FILE = str(Path(__file__).resolve())


def main(way: str, folder: str | None = None) -> None:
    if folder is not None:
        atexit.register(end_after_rank_0, Path(folder))  # runs after Horovod was shut down

    import torch

    import horovod.torch as hvd
    from horovod.common.generations import loss_note

    # Who is named must not depend on how soon processes get the processor.
    loss_note._PATIENCE = 100.0
    if way != "0":  # then the launcher ends those that wait
        loss_note._HEAD_START = 100.0
    hvd.init()
    if folder is not None and hvd.rank() == 0:
        Path(folder, "pid").write_text(str(os.getpid()))
    if hvd.rank() != 1:
        atexit.unregister(end_after_rank_0)
    for _ in range(3):
        hvd.allreduce(torch.ones(4), name="together")
    if hvd.rank() == 1:
        if way == "raise":
            raise ValueError("the reason of it all")
        sys.exit(int(way))
    hvd.allreduce(torch.ones(4), name="without rank 1")


def end_after_rank_0(folder: Path) -> None:
    pid = (folder / "pid").read_text()
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)  # between looks


if __name__ == "__main__":
    main(*sys.argv[1:])
