"""The variables that a worker gets from the launcher.

`worker_specs` and the elastic job call it. `horovod.common.environments` reads the HOROVOD_* names
in the worker; the names of torchrun are there for plain torch.distributed scripts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod.common.config import Config
from horovod.common.wire import encode_key
from horovod.runner.slots.hosts import Slot

KEY = "_HOROVOD_SECRET_KEY"
KEEP_HEAP = "HOROVOD_KEEP_HEAP"

HOSTS_OWN = ("HOME", "LOGNAME", "MAIL", "SHELL", "TMPDIR", "USER", "XDG_RUNTIME_DIR")
"""Variables that a worker takes from the host it runs on: who the user is there, and where that
user's files are."""

_STAYS = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|.*CUDA_VISIBLE_DEVICES"  # as ever with horovodrun
    r"|HOSTNAME|TEMP|TMP|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|XDG_SESSION_.*|DBUS_.*"
    r"|SSH_.*|SUDO_.*|WINDOWID|TTY|GPG_TTY|STY|TMUX.*|_HOROVOD_SECRET_KEY|" + "|".join(HOSTS_OWN)
)
"""What is true of the launcher's machine and session alone."""


@dataclass(frozen=True)
class WorkerRendezvous:
    """Where the ranks of the job meet."""

    address: str
    store_port: int  # the launcher's store
    free_port: int  # for the user's own init_process_group
    key: bytes
    master: str = ""  # rank 0's host, where that port is; the same address if empty


def common_variables(meeting: WorkerRendezvous) -> dict[str, str]:
    """The variables that are the same for all workers."""
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting.store_port),
        KEY: encode_key(meeting.key),
        "MASTER_ADDR": meeting.master or meeting.address,
        "MASTER_PORT": str(meeting.free_port),
        "PYTHONUNBUFFERED": "1",
    }


def slot_variables(slot: Slot) -> dict[str, str]:
    """The variables that say which worker it is: its slot, and the same in torchrun's names."""
    return {
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot).items()},
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
    }


def memory_variables(machine: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Let torch keep the memory that training frees, as `hvd.init()` does with glibc's heap.

    Its builds for aarch64 have an allocator of their own, mimalloc, which gives back what has not
    been used for 10 ms, and takes orders from its environment alone. ResNet-18 spends a twentieth
    of its step on getting that memory anew.
    """
    kept = Config.from_env({KEEP_HEAP: environ.get(KEEP_HEAP, "")}).keep_heap
    tuned = any(name.upper().startswith("MIMALLOC_") for name in environ)
    if machine != "aarch64" or tuned or not kept:
        return {}
    return {"MIMALLOC_PURGE_DELAY": "-1"}


def terminal_variables(columns: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Tell workers that a person is watching, and how wide their progress bars may be."""
    room = max(20, columns - len("[0]<stderr>:"))
    return {"HOROVOD_LAUNCHER_TTY": "1", "COLUMNS": environ.get("COLUMNS", str(room))}


def travelling(environ: Mapping[str, str], keeps: Sequence[str] | None = ()) -> dict[str, str]:
    """The part of the launcher's environment that goes along to another host.

    ``keeps`` are the variables that workers take from the host itself.
    """
    stays = frozenset(keeps or ())
    return {
        name: value
        for name, value in environ.items()
        if name not in stays and not _STAYS.fullmatch(name)
    }


def interface_variables(nics: Sequence[str]) -> dict[str, str]:
    """Variables that keep the traffic between hosts on these interfaces of a host."""
    return {"HOROVOD_GLOO_IFACE": nics[0], "NCCL_SOCKET_IFNAME": ",".join(nics)} if nics else {}


CROWDED_ADVICE = "Start one rank for each core or GPU (-np), or take more hosts (-H)."
"""What to do where ranks outnumber the cores of their host."""


def threads_per_worker(cores: int, local_size: int) -> int:
    """A fair share of the cores of a host."""
    return max(1, cores // local_size)
