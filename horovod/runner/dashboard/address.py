"""Where the page is served: what --dashboard and HOROVOD_DASHBOARD may say."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from dataclasses import dataclass

from horovod.common.addresses import LOOPBACK

DEFAULT_PORT = 8470
_NEXT_PORTS = 100
"""How many ports after the wanted one are tried where it is in use."""

_ON, _OFF = ("on", "1", "true", "yes"), ("off", "0", "false", "no")
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]*):)?(?P<port>[0-9]{1,5})")
PATTERN = f"(?i:{'|'.join(_ON + _OFF)})|{re.sub('[?]P<[a-z]+>', '?:', _ADDRESS.pattern)}"
"""``ADDRESS:PORT``, ``:PORT``, ``PORT``, or whether there is to be a page at all."""


@dataclass(frozen=True)
class Address:
    """An address of this machine and the first port to try; 0 is any free one."""

    host: str = LOOPBACK
    port: int = DEFAULT_PORT


def looks_like_address(text: str) -> bool:
    """Whether a word after --dashboard belongs to it: otherwise it is the command."""
    return re.fullmatch(PATTERN, text) is not None


def parse_address(text: str | None) -> Address | None:
    """None where no page is wanted; `ValueError` for what is no address."""
    if text is None or text.lower() in _OFF or not text.strip():
        return None
    if text.lower() in _ON:
        return Address()
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise ValueError(
            f"{text!r} is not ADDRESS:PORT; for example 127.0.0.1:{DEFAULT_PORT}, "
            f"0.0.0.0:{DEFAULT_PORT} or on"
        )
    return Address((match["host"] or LOOPBACK).strip("[]"), int(match["port"]))


def listen(wanted: Address) -> socket.socket:
    """A socket that listens there, or at the next free port; `OSError` for a wrong address."""
    found = socket.getaddrinfo(wanted.host, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    last = min(wanted.port + _NEXT_PORTS, 65535) if wanted.port else 0
    for port in [*range(wanted.port, last + 1), 0]:
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((address[0], port, *address[2:]))
                sock.listen(128)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES) or port == 0:
                    raise
                continue
            stack.pop_all()
            return sock
    raise AssertionError("the last port to try was any free one")


def link(listener: socket.socket, token: str) -> str:
    """What a person opens; without a token where that is empty."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/" + (f"?token={token}" if token else "")
