"""Restricts servers of TensorFlow's data service to one address of this host.

The servers have no authentication and listen on all addresses, and no option changes that. So
`compute_service` starts them inside `restrict_to`, which attaches a filter to their listening
sockets. The kernel then drops packets for any other address, as if the sockets were bound to one.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from horovod.common.logging import get_logger

# Operations of the kernel's packet filter from linux/filter.h, on a packet's network header.
_SO_ATTACH_FILTER = 26
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000
_DESTINATION = {4: 16, 6: 24}  # its offset in the header of either version of IP
_ALL, _NOTHING = 0xFFFFFFFF, 0


@contextmanager
def restrict_to(address: str) -> Iterator[None]:
    """Restrict servers that this process starts inside this context to the address."""
    before = set(_listening_sockets())
    yield
    started = [fd for inode, fd in _listening_sockets().items() if inode not in before]
    try:
        for fd in started:
            with socket.socket(fileno=os.dup(fd)) as listener:
                _drop_others(listener, address)
    except OSError as error:
        get_logger(__name__).warning(
            "cannot keep TensorFlow's data service to %s (%s): it listens on all addresses of this "
            "host, and serves everybody who can reach one: protect it with a firewall",
            address,
            error,
        )


def _listening_sockets() -> dict[int, int]:
    """Return this process's sockets that listen on all addresses, as file descriptors by inode."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                waits = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if waits and ipaddress.ip_address(sock.getsockname()[0]).is_unspecified:
                    sockets[os.fstat(sock.fileno()).st_ino] = int(name)
        except OSError:
            continue  # another thread has just closed it
    return sockets


def _drop_others(listener: socket.socket, address: str) -> None:
    """Attach a filter that drops packets for other addresses than this one."""
    destination = ipaddress.ip_address(address)
    words = struct.unpack(f"!{len(destination.packed) // 4}I", destination.packed)
    at = _NETWORK_HEADER + _DESTINATION[destination.version]
    expected = [(_LOAD_WORD, at + 4 * index, word) for index, word in enumerate(words)]
    steps = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    # Each comparison that fails jumps over the remaining ones and over the step that accepts.
    steps.append((_JUMP_IF_EQUAL, 0, 2 * len(expected) + 1, destination.version))
    for left, (load, where, word) in zip(range(len(expected) - 1, -1, -1), expected, strict=True):
        steps += [(load, 0, 0, where), (_JUMP_IF_EQUAL, 0, 2 * left + 1, word)]
    steps += [(_RETURN, 0, 0, _ALL), (_RETURN, 0, 0, _NOTHING)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
