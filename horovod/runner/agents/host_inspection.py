"""The program that ``horovodrun --check`` runs on every host, as a job would run a rank there.

`host_check` sends its source and talks to it through stdin and stdout, one JSON object a line. It
must work where Horovod is missing or of another version, so it uses the standard library alone, and
it imports no framework: that takes seconds. The questions and their answers:

- ``{"facts": {"address", "token", "folder", "files"}}``: the answer says what this host has, which
  of the ``files`` are missing, and the port on which the program now listens at that address.
- ``{"clock": number}``: the answer has the time, and the same number.
- ``{"neighbours": [[name, address, port, measure], ...], "seconds"}``: the answer says for each
  name how long a round trip takes and, where ``measure`` is true, how many bytes a second arrive;
  or an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_ROUND_TRIPS = 20
_SEND_SECONDS = 0.4  # how long bytes are sent
_CHUNK = bytes(1 << 20)
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def gather_facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return what a job would find on this host: versions, devices, memory and files."""
    gpus, driver = find_gpus()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch_version(),
        "horovod": horovod_version(),
        "nccl": nccl_version(),
        "driver": driver,
        "gpus": gpus,
        "memory": memory_bytes(),
        "lost_folder": "" if is_working_folder(request["folder"]) else request["folder"],
        "content": folder_digest("."),
        "missing": [name for name in request["files"] if not is_here(name)],
    }


def is_working_folder(path: str) -> bool:
    """Return whether the program runs in that folder; the agent uses another if it is missing."""
    try:
        return os.path.samefile(path, ".")
    except OSError:
        return False


def is_here(name: str) -> bool:
    """Return whether a program is on PATH, or a file in the working folder."""
    return shutil.which(name) is not None or os.path.exists(name)


def horovod_version() -> str:
    """Return Horovod's version; an empty string if it is missing or fails to import."""
    try:
        import horovod
    except Exception:
        return ""
    return str(getattr(horovod, "__version__", "unknown"))


def torch_version() -> str:
    """Read torch's version from its files; return an empty string if there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    with contextlib.suppress(OSError):
        path = os.path.join(os.path.dirname(spec.origin), "version.py")
        with open(path, encoding="utf-8") as file:
            found = re.search(r"__version__ = ['\"](.+?)['\"]", file.read())
            if found:
                return found[1]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return "unknown"


def nccl_version() -> str:
    """Return the version of torch's own NCCL or of the system's; an empty string if none."""
    for package in _NCCL_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    with contextlib.suppress(OSError, AttributeError):
        number = ctypes.c_int()
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0:
            major, rest = divmod(number.value, 10_000)
            return f"{major}.{rest // 100}.{rest % 100}"
    return ""


def find_gpus() -> tuple[list[str], str]:
    """Ask NVIDIA's library for the names of the GPUs and the version of their driver."""
    names: list[str] = []
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return [], ""
    except (OSError, AttributeError):
        return [], ""
    text, count = ctypes.create_string_buffer(96), ctypes.c_uint()
    library.nvmlSystemGetDriverVersion(text, len(text))
    driver = text.value.decode(errors="replace")
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            library.nvmlDeviceGetName(device, text, len(text))
            names.append(text.value.decode(errors="replace"))
    library.nvmlShutdown()
    return names, driver


def memory_bytes() -> int:
    """Return the bytes of memory of this host, or of its container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as file:
        total = min(total, int(file.read()))
    return total


def folder_digest(folder: str) -> str:
    """Return a digest of a folder's file names, sizes and times of change, to compare hosts."""
    lines = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            size = found.st_size if entry.is_file(follow_symlinks=False) else 0
            lines.append(f"{entry.name} {size} {int(found.st_mtime)}")
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="replace")).hexdigest()


# -- the network ---------------------------------------------------------------------------------


def serve(address: str, token: bytes) -> int:
    """Listen and answer peers that know the token, each in its own thread; return the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family)

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection, token), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def answer(connection: socket.socket, token: bytes) -> None:
    """Serve one peer: echo each ``p``; after a ``d`` count the bytes and report them at the end."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(10.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(receive(connection, len(token)), token):
            return
        while (byte := connection.recv(1)) == b"p":
            connection.sendall(byte)
        count = 0
        while data := connection.recv(1 << 20):
            count += len(data)
        connection.sendall(count.to_bytes(8, "big"))


def receive(connection: socket.socket, length: int) -> bytes:
    """Receive exactly ``length`` bytes; raise `ConnectionError` if the other side ends before."""
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def measure(address: str, port: int, token: bytes, seconds: float, rate: bool) -> dict[str, Any]:
    """Measure the shortest round trip to a neighbour and, if ``rate``, the bytes per second."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            trips = []
            for _ in range(_ROUND_TRIPS):
                start = time.perf_counter()
                connection.sendall(b"p")
                receive(connection, 1)
                trips.append(time.perf_counter() - start)
            found = {"seconds": min(trips)}
            if rate:
                connection.sendall(b"d")
                start = time.perf_counter()
                while time.perf_counter() - start < _SEND_SECONDS:
                    connection.sendall(_CHUNK)
                connection.shutdown(socket.SHUT_WR)
                count = int.from_bytes(receive(connection, 8), "big")
                found["rate"] = count / (time.perf_counter() - start)
            return found
    except OSError as error:
        return {"error": str(error) or type(error).__name__}


def measure_neighbours(request: dict[str, Any], token: bytes) -> dict[str, Any]:
    """Measure the connections to all neighbours at the same time."""
    with ThreadPoolExecutor() as pool:
        futures = {
            name: pool.submit(measure, address, port, token, request["seconds"], rate)
            for name, address, port, rate in request["neighbours"]
        }
    return {name: future.result() for name, future in futures.items()}


def main() -> None:
    """Answer questions until stdin ends."""
    token = b""
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        if "facts" in request:
            token = bytes.fromhex(request["facts"]["token"])
            port = serve(request["facts"]["address"], token)
            reply = {"facts": {**gather_facts(request["facts"]), "port": port}}
        elif "clock" in request:
            reply = {"clock": time.time(), "number": request["clock"]}
        else:
            reply = {"neighbours": measure_neighbours(request, token)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
