"""Find out by trying what is usable on this machine: ``horovodrun --check-build``.

`launch` calls `check_build`. Each probe runs in a process of its own, all at the same time:
importing a framework may take seconds, print something or crash, and must not affect the launcher.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import horovod

_PROBE_SECONDS = 120.0
_DRIVER_SECONDS = 30.0  # for devices to answer, once torch is imported
_KILL_SECONDS = 5.0  # for a probe that was killed to end

# The last line that a probe prints is JSON: for each name that is usable, its version or kind.
_FRAMEWORK = """
import importlib, json
framework = importlib.import_module({module!r})
importlib.import_module("horovod.{module}")
print("\\n" + json.dumps({{{name!r}: getattr(framework, "__version__", "")}}))
"""
_TORCH = """
import json
import torch, horovod.torch
print("\\n" + json.dumps({"PyTorch": torch.__version__, "Gloo": ""}))  # Gloo: that is, TCP
"""
# Nobody else asks the driver: where it crashes or hangs, the rest of the report is still there.
_DEVICES = """
import json
import torch
import torch.distributed as dist

pytorch = f"PyTorch {torch.__version__}"
lines, reasons, found = [], [], {}

def reason(error):
    return str(error).strip().partition("\\n")[0] or type(error).__name__

def find(kind):
    module = getattr(torch, kind)
    try:
        module.init()  # says what is wrong, where is_available() says no
        indices = range(module.device_count())
    except Exception as error:
        reasons.append(reason(error))
        return False
    for index in indices:
        try:
            device = module.get_device_properties(index)
            lines.append(f"{kind}:{index}: {device.name}, {device.total_memory / 2**30:.1f} GiB")
        except Exception as error:
            lines.append(f"{kind}:{index} cannot be used: {reason(error)}")
    return len(indices) > 0

has_cuda = torch.version.cuda or getattr(torch.version, "hip", None)
found_cuda = bool(has_cuda) and find("cuda")
found_xpu = bool(getattr(torch.version, "xpu", None)) and find("xpu")
if not lines:
    lines.append("none: " + ("; ".join(reasons) or f"{pytorch} is built for CPUs only"))
if dist.is_available() and dist.is_nccl_available():
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        lines.append(f"NCCL {version} can be loaded")
        if found_cuda:
            found["NCCL"] = version
    except Exception as error:
        lines.append(f"NCCL cannot be loaded: {reason(error)}")
elif has_cuda:
    lines.append(f"NCCL cannot be loaded: {pytorch} is built without it")
if found_xpu and dist.is_available() and getattr(dist, "is_xccl_available", bool)():
    found["XCCL"] = ""
print("\\n" + json.dumps({"Devices": "\\n".join(lines), **found}))
"""
_MPI = """
import json
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
library = MPI.Get_library_version().strip("\\0 \\n").partition("\\n")[0].partition(",")[0]
print("\\n" + json.dumps({"MPI": f"{library}, mpi4py {mpi4py.__version__}"}))
"""
_LIGHTNING = """
import json
try:
    import lightning as framework
except ModuleNotFoundError:
    import pytorch_lightning as framework
import horovod.lightning
print("\\n" + json.dumps({"Lightning": framework.__version__}))
"""
_SPARK = """
import json, os, shutil
import pyspark, horovod.spark
home = os.environ.get("JAVA_HOME")
if not (os.path.exists(f"{home}/bin/java") if home else shutil.which("java")):
    raise SystemExit("there is no java" + (f" in {home}/bin (JAVA_HOME)" if home else " on PATH"))
print("\\n" + json.dumps({"Spark": pyspark.__version__}))
"""
_DASHBOARD = """
import json
import aiohttp, horovod.observe.dashboard.server
print("\\n" + json.dumps({"Dashboard": f"aiohttp {aiohttp.__version__}"}))
"""
# A child that reads its parent's memory needs the same right as one rank that reads another's.
_SHARED_MEMORY = """
import ctypes, json, mmap, os, socket
secret = os.urandom(16)
memory = os.memfd_create("horovod-check")
os.truncate(memory, mmap.PAGESIZE)
ours, theirs = socket.socketpair()
os.close(os.pidfd_open(os.getpid()))
source = ctypes.create_string_buffer(secret, len(secret))
child = os.fork()
if child == 0:
    _, (received, bell), _, _ = socket.recv_fds(theirs, 1, 2)
    mmap.mmap(received, mmap.PAGESIZE)[: len(secret)] = secret
    os.eventfd_write(bell, 1)
    try:
        from horovod.transport.host.peer_memory import PeerMemory
        copy = ctypes.create_string_buffer(len(secret))
        PeerMemory(os.getppid()).read(
            ctypes.addressof(copy), ctypes.addressof(source), len(secret)
        )
        os._exit(0 if copy.raw == secret else 1)
    except BaseException as error:
        print("reading another process's memory:", error, flush=True)
        os._exit(1)
from horovod.transport.host.peer_memory import allow_peers
allow_peers([child])
bell = os.eventfd(0)
socket.send_fds(ours, [b"x"], [memory, bell])
direct = os.waitpid(child, 0)[1] == 0
os.eventfd_read(bell)
assert mmap.mmap(memory, mmap.PAGESIZE)[: len(secret)] == secret
print("\\n" + json.dumps({"Shared memory": "memfd, process_vm_readv" if direct else "memfd"}))
"""


@dataclass(frozen=True)
class _Probe:
    program: str
    name: str = ""  # what it looks for, where that is one thing
    module: str = ""  # whose absence needs no explanation
    limit: float = _PROBE_SECONDS  # seconds it has left when those before it in the list have ended


_PROBES = (
    _Probe(_TORCH, "PyTorch", "torch"),
    _Probe(_DEVICES, "Devices", "torch", _DRIVER_SECONDS),  # second: torch is imported by then
    _Probe(_MPI, "MPI", "mpi4py"),
    _Probe(_SHARED_MEMORY, "Shared memory"),
    _Probe(_LIGHTNING, "Lightning", "pytorch_lightning"),
    _Probe(_SPARK, "Spark", "pyspark"),
    _Probe(_DASHBOARD, "Dashboard", "aiohttp"),
    *(
        _Probe(_FRAMEWORK.format(module=name.lower(), name=name), name, name.lower())
        for name in ("TensorFlow", "Keras", "MXNet", "JAX", "Ray")
    ),
)

_SECTIONS = (
    ("Available Frameworks", ("TensorFlow", "PyTorch", "Keras", "MXNet", "JAX", "Lightning")),
    ("Available Controllers", ("MPI", "Gloo")),
    (
        "Available Tensor Operations",
        ("NCCL", "XCCL", "DDL", "CCL", "MPI", "Gloo", "Shared memory"),
    ),
    ("Available Clusters", ("Spark", "Ray")),
    ("Available Tools", ("Dashboard",)),
)


def check_build(*, verbose: bool = False) -> str:
    """Return the report; with ``verbose`` it begins with the output of the probes."""
    usable: dict[str, str] = {}
    problems: dict[str, str] = {}
    said: list[str] = []
    processes = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", probe.program],  # unbuffered: the last line is the answer
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for probe in _PROBES
    ]
    deadline = time.monotonic() + _PROBE_SECONDS
    for probe, process in zip(_PROBES, processes, strict=True):
        output, problem = _finish(process, probe.limit, deadline)
        if problem is None:
            output, _, found = output.rpartition("\n")
            usable.update(json.loads(found))
        elif not (probe.module and f"No module named '{probe.module}'" in problem):
            problems[probe.name] = problem
        if output.strip():
            said.append(output.strip())
    report = _report(usable, problems)
    return "\n".join([*said, "", report]) if verbose and said else report


def _finish(
    process: subprocess.Popen[str], limit: float, deadline: float
) -> tuple[str, str | None]:
    """Return what a probe printed, and in one line what went wrong, if anything."""
    left = max(5.0, deadline - time.monotonic())
    try:
        output, _ = process.communicate(timeout=min(limit, left))
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            output, _ = process.communicate(timeout=_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            output = ""  # it hangs in the kernel: a driver can hold even a killed process
        return output, f"no answer within {limit:g} s"
    output = output.rstrip()
    if process.returncode < 0:
        return output, f"the check was ended by {signal.Signals(-process.returncode).name}"
    if process.returncode > 0:
        return output, output.rpartition("\n")[2] or f"exit status {process.returncode}"
    return output, None


def _report(usable: Mapping[str, str], problems: Mapping[str, str]) -> str:
    lines = [f"Horovod v{horovod.__version__}:"]
    for title, entries in _SECTIONS:
        lines += ["", f"{title}:"]
        for entry in entries:
            detail = usable.get(entry) or problems.get(entry)
            box = "X" if entry in usable else " "
            lines.append(f"    [{box}] {entry}" + (f" ({detail})" if detail else ""))
    problem = problems.get("Devices", "PyTorch is not installed")
    devices = usable.get("Devices", f"not known: {problem}")
    lines += ["", "Available Devices:", *(f"    {line}" for line in devices.splitlines())]
    return "\n".join(lines)
