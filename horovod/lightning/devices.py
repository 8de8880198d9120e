"""Chooses the device of this rank, and checks `devices` and `num_nodes` against the job.

Without Horovod, Lightning starts ``devices`` processes on each of ``num_nodes`` nodes. With Horovod
a launcher has started the processes, so the two arguments can only agree with the job or contradict
it. Either may be left out. ``devices=1``, which Lightning 1.x asked for with Horovod, is accepted
too: every process has one device.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import horovod.torch as hvd
from horovod.lightning.current_device import device_count


def check_counts(devices: list[torch.device], num_nodes: int, accelerator: Any) -> None:
    """Raise a ValueError that says what to write if the job does not fit the arguments."""
    count, here, nodes = len(devices), hvd.local_size(), hvd.cross_size()
    # Without an argument Lightning takes all devices of the machine, possibly more than its ranks.
    all_devices = 0 if accelerator is None else int(accelerator.auto_device_count())
    if count not in (1, here, all_devices):
        if hvd.size() == 1:
            raise ValueError(
                f"devices={count} with strategy='horovod', but this process was not started by a "
                f"launcher, so it is alone. Start {count} of them, without devices: "
                f"horovodrun -np {count * num_nodes} python {_script()}"
            )
        raise ValueError(
            f"devices={count}, but the job has {here} process(es) on the node of rank "
            f"{hvd.rank()}. Leave devices out, or write devices={here}; how many there are is "
            f"said to the launcher: horovodrun -np {count * nodes} python {_script()}"
        )
    if num_nodes not in (1, nodes):
        if hvd.size() == 1:
            raise ValueError(
                f"num_nodes={num_nodes} with strategy='horovod', but this process was not started "
                f"by a launcher, so it is alone. Start the job on {num_nodes} hosts, without "
                f"num_nodes: horovodrun -np {count * num_nodes} -H host1:{count},... "
                f"python {_script()}"
            )
        raise ValueError(
            f"num_nodes={num_nodes}, but the job runs on {nodes} node(s): leave num_nodes out, or "
            f"write num_nodes={nodes}"
        )


def own_device(devices: list[torch.device]) -> torch.device:
    """Return the device of this rank."""
    local, here = hvd.local_rank(), hvd.local_size()
    first = devices[0]
    if first.type == "cpu":
        return first
    if len(devices) == 1 and here > 1 and not first.index:
        # devices=1 means one for each process: local rank i takes device i.
        return torch.device(first.type, local % device_count())
    return devices[local % len(devices)]


def _script() -> str:
    """Return the program's path, for commands in error messages."""
    return sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script.py"
