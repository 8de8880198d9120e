"""The variables that a worker gets from the launcher.

Both kinds of job and the launchers for Spark and Ray use it. `horovod.common.environments` reads
the HOROVOD_* names in the worker; torchrun's names are for plain torch.distributed scripts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod.common.config import Config
from horovod.common.topology import Slot
from horovod.common.wire import encode_key

KEY = "_HOROVOD_SECRET_KEY"
KEEP_HEAP = "HOROVOD_KEEP_HEAP"

HOST_VARIABLES = ("HOME", "LOGNAME", "MAIL", "SHELL", "TMPDIR", "USER", "XDG_RUNTIME_DIR")
"""Variables that a worker takes from the host on which it runs: they name the user and the user's
files there."""

_LOCAL_NAMES = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|.*CUDA_VISIBLE_DEVICES"  # Horovod 0.28.1 keeps these back too
    r"|HOSTNAME|TEMP|TMP|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|XDG_SESSION_.*|DBUS_.*"
    r"|SSH_.*|SUDO_.*|WINDOWID|TTY|GPG_TTY|STY|TMUX.*|_HOROVOD_SECRET_KEY|"
    + "|".join(HOST_VARIABLES)
)
"""Variables that describe the launcher's machine and session alone."""


@dataclass(frozen=True)
class WorkerRendezvous:
    """The addresses and the key with which the ranks of a job find each other."""

    address: str
    store_port: int  # the launcher's store
    key: bytes
    master: str = ""  # the address of rank 0's host, for the user's own init_process_group
    master_port: int = 0  # a port that is free there


def common_variables(rendezvous: WorkerRendezvous) -> dict[str, str]:
    """Return the variables that are the same for all workers."""
    found = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous.store_port),
        KEY: encode_key(rendezvous.key),
        "PYTHONUNBUFFERED": "1",
    }
    if rendezvous.master:
        found |= {"MASTER_ADDR": rendezvous.master, "MASTER_PORT": str(rendezvous.master_port)}
    return found


def slot_variables(slot: Slot) -> dict[str, str]:
    """Return the variables that describe a worker's slot, in Horovod's names and torchrun's."""
    return {
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot).items()},
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
    }


def memory_variables(machine: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that let torch keep freed memory, as `hvd.init()` does with glibc's heap.

    torch's builds for aarch64 have an allocator of their own, mimalloc, which gives memory back to
    the system after 10 ms and can be configured by its environment alone. ResNet-18 spends a
    twentieth of its step on getting that memory again.
    """
    kept = Config.from_env({KEEP_HEAP: environ.get(KEEP_HEAP, "")}).keep_heap
    tuned = any(name.upper().startswith("MIMALLOC_") for name in environ)
    if machine != "aarch64" or tuned or not kept:
        return {}
    return {"MIMALLOC_PURGE_DELAY": "-1"}


def terminal_variables(columns: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that tell workers that a person watches, and the width of the terminal."""
    room = max(20, columns - len("[0]<stderr>:"))
    return {"HOROVOD_LAUNCHER_TTY": "1", "COLUMNS": environ.get("COLUMNS", str(room))}


def travelling_variables(
    environ: Mapping[str, str], own_variables: Sequence[str] | None = ()
) -> dict[str, str]:
    """Return the part of the launcher's environment that workers on another host get.

    Args:
        environ: The launcher's environment.
        own_variables: The variables that workers take from the host itself.
    """
    own_names = frozenset(own_variables or ())
    return {
        name: value
        for name, value in environ.items()
        if name not in own_names and not _LOCAL_NAMES.fullmatch(name)
    }


def interface_variables(nics: Sequence[str]) -> dict[str, str]:
    """Return variables that keep the traffic between hosts on these network interfaces."""
    return {"HOROVOD_GLOO_IFACE": nics[0], "NCCL_SOCKET_IFNAME": ",".join(nics)} if nics else {}


CROWDED_ADVICE = "Start one rank for each core or GPU (-np), or take more hosts (-H)."
"""Advice for jobs in which ranks outnumber the cores of their host."""


def threads_per_worker(cores: int, local_size: int) -> int:
    """Return the number of threads with which the workers share the cores of a host evenly."""
    return max(1, cores // local_size)
