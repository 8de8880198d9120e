"""The accelerators of this machine, on every version of torch that we support, and ranks on them.

`accelerator` is for tests with one rank, or ranks that share a device through host memory. Tests of
several ranks that talk through NCCL take `nccl_environment` for `tests.ranks`, and their ranks call
`own_device`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

# "cpu" runs the tests of tests/gpu with tensors in host memory, to try the tests themselves.
TEST_DEVICE = "HOROVOD_TEST_DEVICE"


def accelerator() -> torch.device | None:
    """What `torch.accelerator` finds, which is there since torch 2.6."""
    if hasattr(torch, "accelerator"):
        found = torch.accelerator
        return found.current_accelerator() if found.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def on_cpu() -> bool:
    """Whether host memory stands in for GPUs."""
    return os.environ.get(TEST_DEVICE) == "cpu"


def gpu_count() -> int:
    """The number of CUDA devices, without a context on any of them."""
    return torch.cuda.device_count()


def nccl_environment(
    size: int, settings: Mapping[str, str] | None = None
) -> Callable[[int], dict[str, str]]:
    """The environment of each of `size` ranks that use NCCL, on as many GPUs as there are.

    With fewer GPUs than ranks, ranks share them: NCCL takes two ranks for duplicates by host and
    bus id, and takes the host from NCCL_HOSTID where that is set. Their bytes go over sockets.

    Args:
        size: Number of ranks.
        settings: More variables, for all ranks.

    Returns:
        A function that takes a rank, for `RankPool`, `run_ranks` and `start_ranks`.
    """
    count = gpu_count()

    def environment(rank: int) -> dict[str, str]:
        own = dict(settings or {})
        if on_cpu():
            # Buckets are reduced beside backward, as on devices.
            return {TEST_DEVICE: "cpu", "HOROVOD_OVERLAP_BACKWARD": "1", **own}
        if count < size:
            own = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", **own}
        return own

    return environment


def own_device(number: int | None = None) -> torch.device:
    """Called in a rank: its device, which becomes the current one.

    Args:
        number: Which one, counted round and round; by default the rank that it started as.
    """
    if on_cpu():
        return torch.device("cpu")
    if number is None:
        number = int(os.environ["HOROVOD_RANK"])
    device = torch.device("cuda", number % gpu_count())
    torch.cuda.set_device(device)
    return device
