"""``horovodrun --check-build``: what is usable on this machine, found out by trying.

Each probe runs in a process of its own, all at once: importing a framework may take seconds, print,
or crash, and the launcher stays free of it. Called by `launch` only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import horovod

_PROBE_SECONDS = 120

# What a probe prints on its last line are the names that are usable.
_TORCH = """
import torch, horovod.torch
import torch.distributed as dist
found = ["PyTorch"]
if dist.is_available():
    if dist.is_gloo_available():
        found.append("Gloo")
    if dist.is_nccl_available() and torch.cuda.is_available():
        found.append("NCCL")
    if getattr(dist, "is_xccl_available", bool)() and torch.xpu.is_available():
        found.append("XCCL")
print("\\n" + " ".join(found))
"""
_TENSORFLOW = "import tensorflow, horovod.tensorflow; print('\\nTensorFlow')"
_MXNET = "import mxnet, horovod.mxnet; print('\\nMXNet')"
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
print("\\nMPI")
"""
_PROBES = (_TENSORFLOW, _TORCH, _MXNET, _MPI)

_SECTIONS = (
    ("Available Frameworks", ("TensorFlow", "PyTorch", "MXNet")),
    ("Available Controllers", ("MPI", "Gloo")),
    (
        "Available Tensor Operations",
        ("NCCL", "XCCL", "DDL", "CCL", "MPI", "Gloo", "Shared memory"),
    ),
)


def check_build(*, verbose: bool = False) -> str:
    """The report; with ``verbose``, what the probes said comes first."""
    usable: set[str] = set()
    said: list[str] = []
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", probe],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for probe in _PROBES
    ]
    for process in processes:
        try:
            output, _ = process.communicate(timeout=_PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\n(no answer within {_PROBE_SECONDS} s)"
        if process.returncode == 0:
            output, _, names = output.rstrip().rpartition("\n")
            usable.update(names.split())
        if output.strip():
            said.append(output.strip())
    if _has_shared_memory():
        usable.add("Shared memory")
    text = [f"Horovod v{horovod.__version__}:"]
    for title, entries in _SECTIONS:
        text += ["", f"{title}:"]
        text += [f"    [{'X' if entry in usable else ' '}] {entry}" for entry in entries]
    return "\n".join([*said, "", *text] if verbose and said else text)


def _has_shared_memory() -> bool:
    """Whether the kernel offers what the transport inside one host is made of."""
    attempts: tuple[Callable[[], int], ...] = (
        lambda: os.memfd_create("horovod-check"),
        lambda: os.eventfd(0),
        lambda: os.pidfd_open(os.getpid()),
    )
    for attempt in attempts:
        try:
            os.close(attempt())
        except (AttributeError, OSError):
            return False
    return True
