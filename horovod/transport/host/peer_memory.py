"""Reading and writing another process's memory with one copy (Linux "cross memory attach").

`process_vm_readv` and `process_vm_writev` need the right to ptrace the peer: same user, and no
policy against it. Where Yama restricts ptrace to descendants, each process names its peers as
allowed tracers first. Whether it works is found out by trying, never assumed. Called by the
shared-memory transport.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value
_NO_SUCH_PROCESS = 3  # ESRCH
_BAD_ADDRESS = 14  # EFAULT


_SPAN = struct.Struct("PN")  # struct iovec: address and length
_PAIR = struct.Struct("PNPN")

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    for _name in ("process_vm_readv", "process_vm_writev"):
        _call = getattr(_libc, _name)
        _call.restype = ctypes.c_ssize_t
        _call.argtypes = (
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        )


def allow_peers(pids: Iterable[int]) -> None:
    """Let `pids` access this process's memory where Yama would otherwise refuse siblings.

    Yama keeps a single exception per process, so with several peers it is opened to all
    processes of the same user; without Yama the call does nothing.
    """
    if _libc is None:
        return
    peers = list(pids)
    who = peers[0] if len(peers) == 1 else _PR_SET_PTRACER_ANY
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(who), 0, 0, 0)


def memory_name(pid: int) -> str:
    """Return what errors call the memory of a process, in their `filename`."""
    return f"memory of process {pid}"


class PeerMemory:
    """One peer's address space. Not thread-safe: the description of a copy is reused."""

    def __init__(self, pid: int) -> None:
        if _libc is None:
            raise OSError("cross memory attach needs Linux")
        self.pid = pid
        self._spans = ctypes.create_string_buffer(_PAIR.size)  # ours, the peer's
        self._local_at = ctypes.addressof(self._spans)
        self._remote_at = self._local_at + _SPAN.size
        self._readv = _libc.process_vm_readv
        self._writev = _libc.process_vm_writev

    def read(self, local: int, remote: int, length: int) -> None:
        """Copy `length` bytes from the peer's address `remote` to our address `local`."""
        _PAIR.pack_into(self._spans, 0, local, length, remote, length)
        moved = self._readv(self.pid, self._local_at, 1, self._remote_at, 1, 0)
        if moved != length:
            self._move_rest(self._readv, local, remote, length, moved)

    def write(self, local: int, remote: int, length: int) -> None:
        """Copy `length` bytes from our address `local` to the peer's address `remote`."""
        _PAIR.pack_into(self._spans, 0, local, length, remote, length)
        moved = self._writev(self.pid, self._local_at, 1, self._remote_at, 1, 0)
        if moved != length:
            self._move_rest(self._writev, local, remote, length, moved)

    def read_spans(self, local: int, nbytes: int, spans: int, count: int) -> None:
        """Copy `count` pieces of the peer's memory one after the other to our address `local`.

        `spans` is the address of an array of struct iovec. The pieces have `nbytes` in all.
        """
        _SPAN.pack_into(self._spans, 0, local, nbytes)
        moved = self._readv(self.pid, self._local_at, 1, spans, count, 0)
        if moved != nbytes:
            self._fail(moved)

    def write_spans(self, local: int, nbytes: int, spans: int, count: int) -> None:
        """Copy `count` pieces of our memory into pieces of the peer's memory of the same sizes.

        `local` and `spans` are the addresses of arrays of struct iovec. The pieces have `nbytes`
        in all.
        """
        moved = self._writev(self.pid, local, count, spans, count, 0)
        if moved != nbytes:
            self._fail(moved)

    def _fail(self, moved: int, otherwise: int = _BAD_ADDRESS) -> None:
        """Raise the error of a call that did not move all bytes, or else the error `otherwise`."""
        code = ctypes.get_errno() if moved < 0 else otherwise
        raise OSError(code, os.strerror(code), memory_name(self.pid))

    def _move_rest(
        self, call: ctypes._NamedFuncPointer, local: int, remote: int, length: int, moved: int
    ) -> None:
        """Continue after a call that copied only a part: the kernel moves at most 2 GiB at once."""
        while moved > 0:
            local, remote, length = local + moved, remote + moved, length - moved
            if not length:
                return
            _PAIR.pack_into(self._spans, 0, local, length, remote, length)
            moved = call(self.pid, self._local_at, 1, self._remote_at, 1, 0)
        self._fail(moved, _NO_SUCH_PROCESS)
