"""Messages over connected sockets: any number at a time, both ways, without a thread or a copy.

Messages are queued on the stream of a peer, and the thread that waits for them moves them
(`finish`). A message is made of pieces of memory, which the kernel gathers and scatters. It begins
with its number on that connection and its size, so that ranks which are out of step notice it
instead of taking one message for another. Used by the TCP transport.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from horovod.common.exceptions import HorovodInternalError

_HEADER = struct.Struct("<QQ")  # number of the message, bytes that follow
_NOW = int(socket.MSG_DONTWAIT)  # plain numbers, because Python takes microseconds to combine flags
_LOOK = int(socket.MSG_PEEK) | _NOW
_MOST_PIECES = 512  # in one call of the kernel, whose limit is 1024

# Bytes of a long message that the kernel collects before it wakes the thread that waits. On a slow
# network every packet would wake the thread, which each time takes the core from backward. At 1
# Gbit/s this is 4 ms.
_WORTH_WAKING = 512 * 1024
_LOOK_MS = 1000  # between looks at fewer bytes: what comes may be shorter than what we expect

Piece = Any  # a contiguous buffer that is not empty: memoryview, bytes or numpy array


class Outgoing:
    """A message to be sent. Its memory must not change until it is `done`."""

    __slots__ = ("before", "done", "left", "pieces")

    def __init__(
        self, pieces: list[Piece], nbytes: int, before: Callable[[], object] | None = None
    ) -> None:
        self.pieces = pieces
        self.left = nbytes
        self.before = before  # called when it is the message's turn: it may fill the memory then
        self.done = False


class Incoming:
    """A message to be received. Without `pieces` it may have any size, and is put into `body`."""

    __slots__ = ("body", "done", "header", "left", "nbytes", "pieces", "then")

    def __init__(
        self,
        pieces: list[Piece] | None,
        nbytes: int | None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self.header: bytearray | None = bytearray(_HEADER.size)
        self.pieces: list[Piece] = [memoryview(self.header)]
        if pieces is not None:
            self.pieces += pieces
        self.nbytes = nbytes  # None: any number
        self.left = _HEADER.size + (nbytes or 0)  # bytes that are known to come
        self.then = then  # called when it has arrived, before the next message of the stream
        self.body = b"" if nbytes is not None else bytearray()
        self.done = False


class MessageStream:
    """The messages of one connection."""

    __slots__ = ("_received", "_sent", "_wake_bytes", "arriving", "leaving", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.leaving: deque[Outgoing] = deque()
        self.arriving: deque[Incoming] = deque()
        self._sent = self._received = 0
        self._wake_bytes = 1  # how many the kernel collects before it wakes us

    def send(
        self, pieces: list[Piece], nbytes: int, before: Callable[[], object] | None = None
    ) -> Outgoing:
        """Queue a message of `nbytes`, made of `pieces`; call `before` when it is its turn."""
        header = _HEADER.pack(self._sent, nbytes)
        message = Outgoing([header, *pieces], len(header) + nbytes, before)
        self._sent += 1
        self.leaving.append(message)
        return message

    def receive(
        self,
        pieces: list[Piece] | None,
        nbytes: int | None,
        then: Callable[[], object] | None = None,
    ) -> Incoming:
        """Expect a message, after those that are expected already.

        Args:
            pieces: The memory for the message; None to have it in `Incoming.body`.
            nbytes: The size of the message; None for any.
            then: A function to call when it has arrived, before the next message is received.
        """
        message = Incoming(pieces, nbytes, then)
        self.arriving.append(message)
        return message

    def push(self) -> bool:
        """Send what the kernel takes, and return whether it may take more."""
        while self.leaving:
            message = self.leaving[0]
            pieces = message.pieces
            if message.before is not None:
                message.before()
                message.before = None
            try:
                count = self.socket.sendmsg(pieces[:_MOST_PIECES], (), _NOW)
            except BlockingIOError:
                return False
            message.left -= count
            if message.left:
                _take(pieces, count)
                return False
            pieces.clear()
            message.done = True
            self.leaving.popleft()
        return True

    def pull(self, flags: int = _NOW) -> bool:
        """Receive what has arrived, and return whether there may be more.

        With flags of 0 it waits for the first bytes.
        """
        if not flags:
            self._wake_for(1)  # a larger mark could be more than what is still to come
        while self.arriving:
            message = self.arriving[0]
            pieces = message.pieces
            try:
                if len(pieces) == 1:
                    count = self.socket.recv_into(pieces[0], 0, flags)
                else:
                    count = self.socket.recvmsg_into(pieces[:_MOST_PIECES], 0, flags)[0]
            except BlockingIOError:
                return False
            if count == 0:
                raise ConnectionResetError("the connection is closed")
            flags = _NOW
            message.left -= count
            if message.left:
                _take(pieces, count)
            else:
                pieces.clear()
            if message.header is not None:
                self._check(message)
            elif message.left:
                return False
            if not pieces:
                message.done = True
                self.arriving.popleft()
                if message.then is not None:
                    message.then()
        return True

    def awaits_peer(self) -> bool:
        """Return whether nothing can be moved until the peer reads or sends. Any thread may ask.

        If something has arrived that the thread which moves the messages leaves unread, then it is
        not the peer who is awaited.
        """
        try:
            if self.arriving:
                self.socket.recv(1, _LOOK)
                return False
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            return bool(self.leaving) and not poll.poll(0)
        except BlockingIOError:  # nothing has arrived
            return True
        except OSError:  # the connection has ended
            return False

    def set_wake_mark(self) -> None:
        """Tell the kernel, before we poll, how many bytes are worth waking us."""
        self._wake_for(min(self.arriving[0].left, _WORTH_WAKING) if self.arriving else 1)

    def _wake_for(self, nbytes: int) -> None:
        """Let the kernel wake us once `nbytes` have arrived."""
        if nbytes != self._wake_bytes:
            self._wake_bytes = nbytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _check(self, message: Incoming) -> None:
        """Check, once the header is complete, that this is the message that we expect."""
        assert message.header is not None
        pieces = message.pieces
        if pieces and isinstance(pieces[0], memoryview) and pieces[0].obj is message.header:
            return
        number, nbytes = _HEADER.unpack(message.header)
        message.header = None
        if number != self._received or message.nbytes not in (None, nbytes):
            raise HorovodInternalError(
                f"out of step with a peer: message {number} of {nbytes} bytes arrived in place of "
                f"message {self._received} of {message.nbytes} bytes; do all ranks run the same "
                f"version of Horovod?"
            )
        self._received += 1
        if message.nbytes is None and nbytes:
            message.body = bytearray(nbytes)
            message.left = nbytes
            pieces.append(memoryview(message.body))


def finish(
    streams: Collection[MessageStream],
    done: Callable[[], bool] | None = None,
    deadline: float | None = None,
) -> None:
    """Move messages until `done` returns True, or until there is nothing left to move.

    Raises:
        TimeoutError: Something was left when `time.monotonic` had reached `deadline`.
    """
    full: set[MessageStream] = set()  # the kernel takes nothing now
    empty: set[MessageStream] = set()  # nothing has arrived
    while done is None or not done():
        busy = [stream for stream in streams if stream.leaving or stream.arriving]
        if not busy:
            return
        moved = False
        for stream in busy:
            if stream.leaving and stream not in full:
                moved = True
                if not stream.push():
                    full.add(stream)
            if stream.arriving and stream not in empty:
                moved = True
                if not stream.pull():
                    empty.add(stream)
        if moved:
            continue
        if deadline is not None:
            if time.monotonic() > deadline:
                raise TimeoutError("nothing has come from some ranks")
            _wait(busy, full, empty)
        elif len(busy) == 1 and not busy[0].leaving and busy[0].arriving[0].nbytes is None:
            busy[0].pull(0)  # waits in the kernel: one call less than to poll before
        else:
            _wait(busy, full, empty)


def _wait(
    streams: Iterable[MessageStream], full: set[MessageStream], empty: set[MessageStream]
) -> None:
    """Wait until a stream can send or receive again, and take it out of `full` or `empty`."""
    poll = select.poll()
    waiting: dict[int, MessageStream] = {}
    for stream in streams:
        stream.set_wake_mark()
        waiting[stream.socket.fileno()] = stream
        events = select.POLLIN if stream.arriving else 0
        poll.register(stream.socket, events | (select.POLLOUT if stream.leaving else 0))
    found = poll.poll(_LOOK_MS)
    for descriptor, events in found:
        if events & ~select.POLLIN:
            full.discard(waiting[descriptor])
        if events & ~select.POLLOUT:
            empty.discard(waiting[descriptor])
    if not found:
        empty.clear()


def _take(pieces: list[Piece], count: int) -> None:
    """Drop the first `count` bytes of the pieces, in place."""
    whole = 0
    for piece in pieces:
        size = len(piece) if isinstance(piece, bytes) else piece.nbytes
        if count < size:
            if count:
                pieces[whole] = memoryview(piece).cast("B")[count:]
            break
        count -= size
        whole += 1
    del pieces[:whole]
