"""Functions that tests run on ranks. Most do without torch, which takes seconds to import."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

HANG = 600.0


def place() -> dict[str, int]:
    """Which rank this is, without starting Horovod."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return {name.lower(): int(os.environ[f"HOROVOD_{name}"]) for name in names}


def rank() -> int:
    return place()["rank"]


def speak(text: str) -> None:
    print(f"{text} {rank()}")
    print(f"{text} {rank()}", file=sys.stderr)


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def total(base: int, step: int = 1) -> tuple[int, ...]:
    """What Horovod itself says, and a sum over all ranks."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    result = hvd.allreduce(torch.tensor([base + step * hvd.rank()]), op=hvd.Sum)
    return (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), int(result))


class Unhappy(Exception):
    """Raised by `fail`; with two arguments, which not every exception survives."""

    def __init__(self, who: int, why: str) -> None:
        super().__init__(who, why)


def fail(who: int) -> None:
    """Rank ``who`` raises; the others would wait for ever."""
    if rank() == who:
        raise Unhappy(who, "on purpose")
    time.sleep(HANG)


def fail_always() -> None:
    raise Unhappy(-1, "always")


def hang(folder: str) -> None:
    """Start a child, say who we are, and stay."""
    import subprocess

    child = subprocess.Popen(["sleep", str(HANG)], start_new_session=True)
    (Path(folder) / f"rank-{rank()}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(HANG)


def everything_visible() -> tuple[str, list[str]]:
    """The job's key, and the command lines of all processes on this machine."""
    lines = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                lines.append(Path("/proc", name, "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                pass  # ended meanwhile
    return os.environ["_HOROVOD_SECRET_KEY"], lines


def train(folder: str) -> tuple[int, int]:
    """Count steps until the file `stop` exists; rank 0 tells step and size in the file `log`.

    `tests.spark.training` looks at these files, and tells processes to fail. A process that comes
    while there is a file `door` waits until it is gone, and joins then.
    """
    while Path(folder, "door").exists():
        time.sleep(0.05)
    import torch

    import horovod.torch as hvd

    hvd.init()
    Path(folder, f"pid-{os.getpid()}").write_text(os.environ["HOROVOD_HOSTNAME"])
    state: Any = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def steps(state: Any) -> tuple[int, int]:
        while not hvd.broadcast_object(Path(folder, "stop").exists(), name="stop"):
            size = int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="size"))
            assert size == hvd.size()
            state.step += 1
            if Path(folder, f"fail-{os.getpid()}").exists():
                raise Unhappy(hvd.rank(), "as it was told")
            if hvd.rank() == 0:
                with Path(folder, "log").open("a") as log:
                    log.write(f"{state.step} {size} {os.getpid()}\n")
            time.sleep(0.02)
            state.commit()
        return state.step, hvd.rank()

    return steps(state)
