"""Which device this rank computes on, and whether `devices` and `num_nodes` fit the job.

Lightning would start ``devices`` processes on each of ``num_nodes`` nodes; with Horovod a launcher
has started them, so the two can only agree or contradict. Each may be left out. ``devices=1``, as
Lightning 1.x asked for with Horovod, is right as well: every process has one.
"""

from __future__ import annotations

from typing import Any

import torch

import horovod.torch as hvd
from horovod.lightning.current_device import device_count


def check_counts(devices: list[torch.device], num_nodes: int, accelerator: Any) -> None:
    """ValueError if the job is not what was asked for, with what to write."""
    count, here, nodes = len(devices), hvd.local_size(), hvd.cross_size()
    # More than ranks here: what the accelerator found by itself, when nothing was asked for.
    found = 0 if accelerator is None else int(accelerator.auto_device_count())
    if count not in (1, here, found):
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
    """The device of this rank."""
    local, here = hvd.local_rank(), hvd.local_size()
    first = devices[0]
    if first.type == "cpu":
        return first
    if len(devices) == 1 and here > 1 and not first.index:
        # devices=1, "one for each process": theirs are those of their local ranks.
        return torch.device(first.type, local % device_count())
    return devices[local % len(devices)]


def _script() -> str:
    import sys

    return sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script.py"
