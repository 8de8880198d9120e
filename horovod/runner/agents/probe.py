"""Find out which addresses of the launcher this host can reach, when the launcher asks for it.

The agent gets this file with the question, and calls `probe`. An address counts as reached when the
peer there proves that it knows the job's key, by the handshake of `horovod.common.wire`. That
handshake is repeated here, because its module takes longer to load than all else that the agent
does, which counts when hundreds of hosts start at once. For the same reason this module uses the
inner modules of `socket`, `threading` and `hashlib`, which loads OpenSSL.
"""

from __future__ import annotations

import _socket as socket
import _thread
import fcntl
import os
from _operator import _compare_digest
from _queue import SimpleQueue

TYPE_CHECKING = False  # as in typing, whose import would delay the agent
if TYPE_CHECKING:
    from collections.abc import Sequence
    from hashlib import sha256
    from typing import Any
else:
    try:
        from _sha2 import sha256  # since Python 3.12
    except ImportError:
        try:
            from _sha256 import sha256
        except ImportError:
            from hashlib import sha256

_HELLO = b"HVDW\x01"  # with the version of the protocol
_NONCE_BYTES = 32
_TAG_BYTES = 32
_BLOCK_BYTES = 64  # the block size of SHA-256
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # for asking the routing table; nothing is sent there

_kept: list[socket.socket] = []


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Try the launcher's endpoints, and say where other hosts reach this one.

    Args:
        request: ``endpoints`` has the [address, port] pairs to try, with the ``key`` of the job in
            hexadecimal and a ``timeout``; ``nics`` has names of network interfaces; ``towards`` has
            addresses of other hosts of the job.

    Returns:
        ``endpoint`` is the pair that worked, or None; ``failures`` has [address, port, reason] for
        those that did not; ``nics`` has the requested interfaces that have an address, with it;
        ``interfaces`` has the names of all; ``address`` is where other hosts reach this one, and
        ``interface`` the name of its interface; ``port`` is reserved at that address for the job
        until this process ends.
    """
    endpoint, failures = _try_all(
        request["endpoints"], bytes.fromhex(request["key"]), request["timeout"]
    )
    addresses = {name: interface_address(name) for name in request["nics"]}
    nics = {name: address for name, address in addresses.items() if address}
    sources = [*nics.values(), *map(source_towards, request["towards"])]
    address = next((each for each in sources if each), "127.0.0.1")
    interfaces = [name for _, name in socket.if_nameindex()]
    return {
        "endpoint": endpoint,
        "failures": failures,
        "nics": nics,
        "interfaces": interfaces,
        "interface": next((n for n in interfaces if interface_address(n) == address), ""),
        "address": address,
        "port": keep_port(address),
    }


def source_towards(address: str) -> str:
    """Return the source address of packets to ``address``; an empty string without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.connect((address, _ANY_PORT))
        return str(sock.getsockname()[0])
    except OSError:
        return ""
    finally:
        sock.close()


def reserve_port(address: str) -> socket.socket:
    """Return a socket with a free port, which the kernel gives to no other program meanwhile.

    The socket never listens. A server that reuses addresses, as torch's store and nearly every
    other does, can therefore take the port at any time.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


def keep_port(address: str) -> int:
    """Reserve a free port until this process ends, and return it."""
    _kept.append(reserve_port(address))
    return int(_kept[-1].getsockname()[1])


def interface_address(name: str) -> str:
    """Return the IPv4 address of an interface; an empty string if it has none."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    request = name.encode()[:15].ljust(256, b"\0")
    try:
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""
    finally:
        sock.close()


def _try_all(
    endpoints: Sequence[Sequence[Any]], key: bytes, timeout: float
) -> tuple[Sequence[Any] | None, list[list[Any]]]:
    """Try all endpoints at once; return the first that answers, and why others failed."""
    answers: SimpleQueue[tuple[Sequence[Any], str]] = SimpleQueue()

    def try_one(endpoint: Sequence[Any]) -> None:
        try:
            _knock(endpoint[0], endpoint[1], key, timeout)
        except OSError as error:
            answers.put((endpoint, str(error) or type(error).__name__))
        else:
            answers.put((endpoint, ""))

    for endpoint in endpoints:
        _thread.start_new_thread(try_one, (endpoint,))
    failures: list[list[Any]] = []
    for _ in endpoints:
        endpoint, reason = answers.get()
        if not reason:
            return endpoint, failures
        failures.append([*endpoint, reason])
    return None, failures


def _knock(address: str, port: int, key: bytes, timeout: float) -> None:
    """Do the handshake with a store; raise `OSError` unless it knows the key."""
    mine = os.urandom(_NONCE_BYTES)
    sock = _connect(address, port, timeout)
    try:
        sock.sendall(_HELLO + mine)
        answer = b""
        while len(answer) < len(_HELLO) + _NONCE_BYTES + _TAG_BYTES:
            data = sock.recv(1 << 10)
            if not data:
                raise ConnectionResetError("the connection was closed without an answer")
            answer += data
        nonces = mine + answer[len(_HELLO) : -_TAG_BYTES]
        if not _compare_digest(answer[-_TAG_BYTES:], authenticate(key, b"server" + nonces)):
            raise PermissionError("somebody else answers there, who does not know this job's key")
        sock.sendall(authenticate(key, b"client" + nonces))
    finally:
        sock.close()


def _connect(address: str, port: int, timeout: float) -> socket.socket:
    """Connect by the first of the name's addresses that answers."""
    host = address.encode()  # text would be encoded by a module that takes 10 ms to import
    failure: OSError = ConnectionError("the name has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(timeout)
        try:
            sock.connect(target)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def authenticate(key: bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA256 of a message (RFC 2104), with a key of at most 64 bytes."""
    padded = key.ljust(_BLOCK_BYTES, b"\0")
    inner = sha256(bytes(byte ^ 0x36 for byte in padded) + message).digest()
    return sha256(bytes(byte ^ 0x5C for byte in padded) + inner).digest()
