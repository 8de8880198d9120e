"""Authenticated messages over a stream: the only format our control plane speaks.

The store, the launcher and its workers talk through this module. It has two halves:
`Session` is the protocol alone (bytes in, messages out, no sockets), so that the server can drive
it from a selector and tests can attack it; `Stream` is a blocking client connection on top.

Handshake, with the job's 32-byte key K and fresh 32-byte nonces a (client) and b (server):

    client -> server   "HVDW" version a
    server -> client   "HVDW" version b  HMAC(K, "server" a b)
    client -> server   HMAC(K, "client" a b)

Both sides prove that they know K over both nonces before either accepts a message, and an
unauthenticated peer can never make us read more than these few bytes. Each direction then has
its own key HMAC(K, "client to server" a b) or HMAC(K, "server to client" a b), and each frame is

    u32 header length, u32 body length, header (a JSON object), body (raw bytes), tag (32 bytes)

where tag = HMAC(direction key, u64 sequence number || everything before the tag). A replayed,
reordered, reflected, altered or cut frame has the wrong tag and ends the connection. Nothing here
is unpickled, ever. Content is authenticated, not encrypted.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 1
KEY_BYTES = 32
MAX_FRAME = 256 * 1024 * 1024
"""Largest header plus body that is accepted, in bytes."""

_MAGIC = b"HVDW"
_NONCE_BYTES = 32
_TAG_BYTES = 32
_HELLO = _MAGIC + bytes([VERSION])
_LENGTHS = struct.Struct("!II")
_SEQUENCE = struct.Struct("!Q")
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder().decode
_RECEIVE_BYTES = 1 << 18
_LONGEST_WAIT = 2e6  # seconds; the operating system takes no more than 24 days


class WireError(ConnectionError):
    """The peer does not speak our protocol, or a frame was damaged, repeated or forged."""


def new_key() -> bytes:
    """Return a fresh random key for one job."""
    return secrets.token_bytes(KEY_BYTES)


def encode_key(key: bytes) -> str:
    """Return the key as text, for an environment variable. Never log the result."""
    return base64.b64encode(check_key(key)).decode("ascii")


def decode_key(text: str) -> bytes:
    """Return the key from its text form.

    Raises:
        ValueError: The text is not a key. The message does not repeat the text.
    """
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"the job's key is not the base64 form of {KEY_BYTES} bytes") from None
    return key


def check_key(key: bytes) -> bytes:
    """Return the key; raise ValueError if it is not one."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"the job's key must be {KEY_BYTES} bytes")
    return key


class Message(NamedTuple):
    """The content of one frame."""

    header: dict[str, Any]
    body: bytes = b""


def _tag(keyed: hmac.HMAC, head: bytes, rest: bytes | memoryview) -> bytes:
    """Return the HMAC of some bytes. `keyed` has the key: for short frames half of the work."""
    mac = keyed.copy()
    mac.update(head)
    mac.update(rest)
    return mac.digest()


class Session:
    """The protocol of one connection, without input or output of its own.

    The caller passes received bytes to `feed`, which returns the complete messages in them. After
    construction and after every `feed` it sends what `take_output` returns. It sends messages as
    the frames that `seal` makes. After a `WireError` or `PermissionError` it closes the connection.

    Args:
        key: The key of the job.
        server: Whether this is the server's side of the handshake.
        max_frame: The largest message that is accepted, in bytes.
    """

    def __init__(self, key: bytes, *, server: bool, max_frame: int = MAX_FRAME) -> None:
        self._key = check_key(key)
        self._server = server
        self._max_frame = max_frame
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._peer_nonce = b""
        self._input = bytearray()
        self._output = bytearray()
        self._sent = 0
        self._received = 0
        self.established = False
        if not server:
            self._output += _HELLO + self._nonce

    def __repr__(self) -> str:
        role = "server" if self._server else "client"
        return f"Session({role}, established={self.established})"

    @property
    def between_frames(self) -> bool:
        """Whether no frame is incomplete, so that the peer may end the connection now."""
        return self.established and not self._input

    def take_output(self) -> bytes:
        """Return the bytes of the handshake that must be sent now."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def feed(self, data: bytes) -> list[Message]:
        """Take received bytes, and return the messages that they complete.

        Raises:
            WireError: The peer does not speak our protocol, or a frame is wrong.
            PermissionError: The peer does not know the key.
        """
        self._input += data
        if not self.established:
            self._check_hello()
            if self._server:
                self._handshake_as_server()
            else:
                self._handshake_as_client()
        messages = []
        while self.established and self._input:
            message = self._next_message()
            if message is None:
                break
            messages.append(message)
        return messages

    def seal(self, header: Mapping[str, Any], body: bytes = b"") -> bytes:
        """Return the frame of a message. Frames must be sent in the order in which they are made.

        Raises:
            WireError: The handshake is not complete.
            ValueError: The message is too large.
        """
        if not self.established:
            raise WireError("no message can be sent before the handshake is complete")
        text = _encode(header).encode()
        if len(text) + len(body) > self._max_frame:
            raise ValueError(
                f"a message of {len(text) + len(body)} bytes is larger than the limit of "
                f"{self._max_frame} bytes"
            )
        head = _LENGTHS.pack(len(text), len(body)) + text
        tag = _tag(self._sender, _SEQUENCE.pack(self._sent) + head, body)
        self._sent += 1
        return b"".join((head, body, tag))

    def _check_hello(self) -> None:
        """Raise as soon as the first bytes show that the peer speaks another protocol."""
        if self._peer_nonce:
            return
        seen = bytes(self._input[: len(_HELLO)])
        if seen[: len(_MAGIC)] != _MAGIC[: len(seen)]:
            raise WireError("the peer does not speak Horovod's protocol")
        if len(seen) == len(_HELLO) and seen != _HELLO:
            # Our own version is the whole answer to a peer of another one: it can then say why.
            self._output += _HELLO if self._server else b""
            raise WireError(
                f"the peer speaks version {seen[-1]} of Horovod's protocol and this process "
                f"version {VERSION}: install the same Horovod everywhere"
            )

    def _handshake_as_server(self) -> None:
        """Answer the client's nonce with ours and a proof, then check the client's proof."""
        if not self._peer_nonce:
            if len(self._input) < len(_HELLO) + _NONCE_BYTES:
                return
            self._peer_nonce = self._take(len(_HELLO) + _NONCE_BYTES)[len(_HELLO) :]
            proof = self._proof(b"server")
            self._output += _HELLO + self._nonce + proof
        if len(self._input) < _TAG_BYTES:
            return
        if not hmac.compare_digest(self._take(_TAG_BYTES), self._proof(b"client")):
            raise PermissionError("the client does not know this job's key")
        self._establish()

    def _handshake_as_client(self) -> None:
        """Check the server's proof, then send ours."""
        if len(self._input) < len(_HELLO) + _NONCE_BYTES + _TAG_BYTES:
            return
        reply = self._take(len(_HELLO) + _NONCE_BYTES + _TAG_BYTES)
        self._peer_nonce = reply[len(_HELLO) : -_TAG_BYTES]
        if not hmac.compare_digest(reply[-_TAG_BYTES:], self._proof(b"server")):
            raise PermissionError("the server's key and this process's key differ")
        self._output += self._proof(b"client")
        self._establish()

    def _take(self, count: int) -> bytes:
        """Remove and return the first `count` received bytes."""
        taken = bytes(self._input[:count])
        del self._input[:count]
        return taken

    def _proof(self, label: bytes) -> bytes:
        """Return the HMAC of a label and both nonces, the client's first."""
        client, server = self._nonce, self._peer_nonce
        if self._server:
            client, server = server, client
        return hmac.digest(self._key, label + client + server, "sha256")

    def _establish(self) -> None:
        """Complete the handshake: from now on each direction has a key of its own."""
        up, down = (
            hmac.new(self._proof(label), digestmod="sha256")
            for label in (b"client to server", b"server to client")
        )
        self._sender, self._receiver = (down, up) if self._server else (up, down)
        self._key = b""  # not needed any more
        self.established = True

    def _next_message(self) -> Message | None:
        """Remove and return the first message, if its frame is complete."""
        if len(self._input) < _LENGTHS.size:
            return None
        header_length, body_length = _LENGTHS.unpack_from(self._input)
        if header_length + body_length > self._max_frame:
            raise WireError(
                f"a frame announces {header_length + body_length} bytes; the limit is "
                f"{self._max_frame}"
            )
        end = _LENGTHS.size + header_length + body_length
        if len(self._input) < end + _TAG_BYTES:
            return None
        with memoryview(self._input) as view:
            expected = _tag(self._receiver, _SEQUENCE.pack(self._received), view[:end])
            if not hmac.compare_digest(expected, bytes(view[end : end + _TAG_BYTES])):
                raise WireError("a frame failed authentication: damaged, repeated or forged")
            text = view[_LENGTHS.size : _LENGTHS.size + header_length].tobytes()
            body = bytes(view[_LENGTHS.size + header_length : end])
        del self._input[: end + _TAG_BYTES]
        self._received += 1
        try:
            header = _decode(text.decode())
        except (ValueError, RecursionError):
            raise WireError("a frame's header is not JSON") from None
        if not isinstance(header, dict):
            raise WireError("a frame's header is not a JSON object")
        return Message(header, body)


class Stream:
    """A blocking, authenticated client connection. Not thread-safe."""

    def __init__(self, sock: socket.socket, session: Session, peer: str) -> None:
        self._socket = sock
        self._session = session
        self._messages: list[Message] = []
        self.peer = peer

    @classmethod
    def connect(cls, address: str, port: int, key: bytes, timeout: float) -> Stream:
        """Open and authenticate a connection, all within `timeout` seconds.

        Raises:
            PermissionError: The server has another key.
            OSError: There is no server, or it does not answer in time.
        """
        deadline = time.monotonic() + timeout
        session = Session(key, server=False)
        sock = socket.create_connection((address, port), timeout=max(timeout, 0.001))
        stream = cls(sock, session, f"{address}:{port}")
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while not session.established:
                stream._write(session.take_output(), deadline)
                stream._read(deadline)
            stream._write(session.take_output(), deadline)
        except BaseException:
            stream.close()
            raise
        return stream

    def send(self, header: Mapping[str, Any], body: bytes = b"", *, timeout: float) -> None:
        """Send a message; raise TimeoutError if the peer does not take it in time."""
        self._write(self._session.seal(header, body), time.monotonic() + timeout)

    def receive(self, timeout: float) -> Message:
        """Return the next message; raise TimeoutError if none arrives in time."""
        deadline = time.monotonic() + timeout
        while not self._messages:
            self._read(deadline)
        return self._messages.pop(0)

    def abort(self) -> None:
        """End the connection while another thread may wait in it; that thread gets an error.

        The descriptor stays open until the stream is dropped. If it were closed here, its number
        could belong to another file before the waiting thread uses it.
        """
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close this process's descriptor. The copy of a parent or child is not affected."""
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()

    def _write(self, data: bytes, deadline: float) -> None:
        if data:
            self._limit(deadline)
            self._socket.sendall(data)

    def _read(self, deadline: float) -> None:
        self._limit(deadline)
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            where = "" if self._session.between_frames else " in the middle of an exchange"
            raise ConnectionResetError(f"{self.peer} closed the connection{where}")
        self._messages += self._session.feed(data)

    def _limit(self, deadline: float) -> None:
        """Let the next call of the socket end at the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer from {self.peer} in time")
        self._socket.settimeout(min(left, _LONGEST_WAIT))
