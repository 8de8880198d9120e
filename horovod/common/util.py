"""Small public helpers that the bindings, the launcher and user scripts share.

The capability queries answer for the machine they run on without importing a framework into the
calling process: the launcher must start fast, and importing MPI would initialise it. They ask a
child process once and remember the answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from horovod.common.reduce_op import Average, ReduceOp, Sum

Item = TypeVar("Item")

PROBE_TIMEOUT_SECONDS = 120.0

_TORCH_PROBE = """
import json, torch
import torch.distributed as dist
nccl = dist.is_available() and dist.is_nccl_available()
version = torch.cuda.nccl.version() if nccl else (0, 0, 0)
print(json.dumps({
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": version[0] * 10000 + version[1] * 100 + version[2],
    "gpu": torch.cuda.is_available(),
}))
"""

_MPI_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"mpi": MPI.Get_library_version()}))
"""


def _ask_child(code: str, verbose: bool) -> dict[str, Any]:
    """What `code`, run by a fresh interpreter, printed as JSON; empty if it failed."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if verbose:
            print(f"The probe did not run: {error}", file=sys.stderr)
        return {}
    if child.returncode != 0:
        if verbose:
            print(child.stderr, file=sys.stderr, end="")
        return {}
    answer = json.loads(child.stdout.splitlines()[-1])
    return dict(answer)


@cache
def _probe_torch(verbose: bool) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        if verbose:
            print("PyTorch is not installed.", file=sys.stderr)
        return {}
    return _ask_child(_TORCH_PROBE, verbose)


@cache
def _probe_mpi(verbose: bool) -> dict[str, Any]:
    if importlib.util.find_spec("mpi4py") is None:
        if verbose:
            print("mpi4py is not installed.", file=sys.stderr)
        return {}
    return _ask_child(_MPI_PROBE, verbose)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the binding ``horovod.<ext_base_name>`` ("torch", ...) can be imported."""
    module = f"horovod.{ext_base_name}"
    if not ext_base_name.isidentifier() or importlib.util.find_spec(module) is None:
        if verbose:
            print(f"There is no binding {module}.", file=sys.stderr)
        return False
    return bool(_ask_child(f"import json, {module}\nprint(json.dumps({{'ok': 1}}))", verbose))


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework of a binding sees a GPU."""
    return ext_base_name == "torch" and bool(_probe_torch(verbose).get("gpu"))


def mpi_built(verbose: bool = False) -> bool:
    """Whether mpi4py and an MPI library are installed."""
    return "mpi4py.MPI" in sys.modules or "mpi" in _probe_mpi(verbose)


def gloo_built(verbose: bool = False) -> bool:
    """Whether PyTorch has Gloo."""
    return bool(_probe_torch(verbose).get("gloo"))


def nccl_built(verbose: bool = False) -> int:
    """PyTorch's NCCL version as major * 10000 + minor * 100 + patch; 0 without NCCL."""
    return int(_probe_torch(verbose).get("nccl", 0))


def ddl_built(verbose: bool = False) -> bool:
    """IBM's DDL was upstream's optional back end; there is none here."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """oneCCL was upstream's optional back end; CPU tensors use shared memory, Gloo or MPI here."""
    return False


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Variables of this process for the time of a block; None values are left as they are."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(items: Sequence[Item], num_parts: int) -> list[list[Item]]:
    """Cut `items` into `num_parts` contiguous parts whose lengths differ by one at most.

    The longer ones come first. No part is empty: fewer items than parts give one part for each.
    ValueError if `num_parts` is not positive.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be positive, not {num_parts}")
    num_parts = min(num_parts, len(items))
    parts: list[list[Item]] = []
    start = 0
    for index in range(num_parts):
        stop = start + len(items) // num_parts + (index < len(items) % num_parts)
        parts.append(list(items[start:stop]))
        start = stop
    return parts


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is `target` (as major.minor.patch) or newer, whatever follows the patch."""
    from packaging.version import Version

    wanted = Version(target)
    if len(wanted.release) != 3:
        raise ValueError(f"target must be of the form major.minor.patch, not {target!r}")
    return (*Version(ver).release, 0, 0)[:3] >= wanted.release


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def check_num_rank_power_of_2(num_rank: int) -> None:
    """ValueError if `num_rank` is not a power of two.

    For scripts that guard Adasum as upstream needed it; here Adasum takes any number.
    """
    if not num_rank_is_power_2(num_rank):
        raise ValueError(f"the number of ranks, {num_rank}, is not a power of two")


def resolve_reduce_op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """The reduction that the arguments `op` and `average` (upstream's older flag) ask for."""
    if average is None:
        if op is None:
            return Average
        if op.__class__ is ReduceOp:
            return op
        try:
            return ReduceOp(op)
        except ValueError:
            raise ValueError(
                f"op must be one of Average, Sum, Adasum, Min, Max, Product, not {op!r}"
            ) from None
    if op is not None:
        raise ValueError("give either op or average, not both; average is the deprecated form")
    warnings.warn(
        "average= is deprecated: pass op=Average or op=Sum instead",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum
