"""Small public helpers that the bindings, the launcher and user scripts share.

The capability queries answer for the machine that they run on, without importing a framework into
the calling process: the launcher must start fast, and importing MPI would initialise it. They ask a
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
    """Return what `code` prints as JSON in a fresh interpreter; empty if it fails."""
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
def _probe(package: str, verbose: bool) -> dict[str, Any]:
    """Return what the installed torch or mpi4py can do; empty if it is not installed."""
    if importlib.util.find_spec(package) is None:
        if verbose:
            print(f"The package {package} is not installed.", file=sys.stderr)
        return {}
    return _ask_child(_TORCH_PROBE if package == "torch" else _MPI_PROBE, verbose)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a binding can be imported.

    Args:
        ext_base_name: The name of the binding, such as "torch" for ``horovod.torch``.
        verbose: Whether to print why it cannot.
    """
    module = f"horovod.{ext_base_name}"
    if not ext_base_name.isidentifier() or importlib.util.find_spec(module) is None:
        if verbose:
            print(f"There is no binding {module}.", file=sys.stderr)
        return False
    return bool(_ask_child(f"import json, {module}\nprint(json.dumps({{'ok': 1}}))", verbose))


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework of a binding sees a GPU.

    Args:
        ext_base_name: The name of the binding; only "torch" is asked.
        verbose: Whether to print why the question cannot be answered.
    """
    return ext_base_name == "torch" and bool(_probe("torch", verbose).get("gpu"))


def mpi_built(verbose: bool = False) -> bool:
    """Return whether mpi4py and an MPI library are installed; `verbose` prints why not."""
    return "mpi4py.MPI" in sys.modules or "mpi" in _probe("mpi4py", verbose)


def gloo_built(verbose: bool = False) -> bool:
    """Return whether PyTorch has Gloo; `verbose` prints why it cannot be asked."""
    return bool(_probe("torch", verbose).get("gloo"))


def nccl_built(verbose: bool = False) -> int:
    """Return PyTorch's NCCL version as major * 10000 + minor * 100 + patch; 0 without NCCL."""
    return int(_probe("torch", verbose).get("nccl", 0))


def ddl_built(verbose: bool = False) -> bool:
    """Return False: IBM's DDL, an optional back end of upstream, is not here."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False: oneCCL, an optional back end of upstream, is not here.

    CPU tensors use shared memory, TCP or MPI instead.
    """
    return False


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of this process for the time of a block.

    Args:
        **kwargs: The variables. One whose value is None is left as it is.
    """
    variables = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(items: Sequence[Item], num_parts: int) -> list[list[Item]]:
    """Cut a list into contiguous parts whose lengths differ by one at most, longer ones first.

    Args:
        items: The list.
        num_parts: The number of parts. No part is empty: fewer items give fewer parts.

    Raises:
        ValueError: `num_parts` is not positive.
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
    """Return whether a version is `target` or newer.

    Args:
        ver: The version. What follows the patch number does not count.
        target: The version to compare with, as major.minor.patch.

    Raises:
        ValueError: `target` does not have three numbers.
    """
    from packaging.version import Version

    target_version = Version(target)
    if len(target_version.release) != 3:
        raise ValueError(f"target must be of the form major.minor.patch, not {target!r}")
    return (*Version(ver).release, 0, 0)[:3] >= target_version.release


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def check_num_rank_power_of_2(num_rank: int) -> None:
    """Raise ValueError if a number of ranks is not a power of two.

    Scripts call it before Adasum, which needs that in upstream; here Adasum takes any number.

    Args:
        num_rank: The number of ranks.
    """
    if not num_rank_is_power_2(num_rank):
        raise ValueError(f"the number of ranks, {num_rank}, is not a power of two")


def resolve_reduce_op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that two arguments ask for together.

    Args:
        op: The reduction; None for Average.
        average: Upstream's older flag for Average or Sum, instead of `op`.

    Raises:
        ValueError: Both are given, or `op` is not a reduction.
    """
    if average is None:
        if op is None:
            return Average
        if isinstance(op, ReduceOp):
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
