"""Messages over connected sockets, of any number and sizes, both ways at once."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.exceptions import HorovodInternalError
from horovod.transport.network import streams
from horovod.transport.network.streams import Incoming, MessageStream, finish
from tests.effort import examples

Connected = Callable[[], AbstractContextManager[tuple[socket.socket, socket.socket]]]

SECONDS = 120  # until something counts as hanging

# A message is the sizes of its pieces on the sending side, how the receiver cuts the same bytes
# (its seed), and whether it knows the size before.
sizes = st.one_of(st.integers(1, 40), st.integers(1, 5_000), st.just(300_000))
messages = st.lists(
    st.tuples(st.lists(sizes, max_size=6), st.integers(0, 1000), st.booleans()), max_size=8
)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Small buffers, so that messages arrive in parts."""
    mine, theirs = socket.socketpair()
    for each in (mine, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        each.settimeout(None)
    with mine, theirs:
        yield mine, theirs


@contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """As ranks have them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with mine, theirs:
        for each in (mine, theirs):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield mine, theirs


def content(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def cut(nbytes: int, seed: int) -> list[int]:
    """`nbytes` as the sizes of some pieces."""
    dice = random.Random(seed)
    found = []
    while nbytes:
        found.append(dice.randint(1, nbytes))
        nbytes -= found[-1]
    return found


def queue(stream: MessageStream, plan: list, salt: int) -> None:
    for number, (lengths, _, _) in enumerate(plan):
        data = content(sum(lengths), salt + number)
        pieces, start = [], 0
        for place, length in enumerate(lengths):
            part = data[start : start + length]
            kinds = (part, memoryview(part), np.frombuffer(part, np.uint8))
            pieces.append(kinds[place % 3])
            start += length
        stream.send(pieces, len(data))


def expect(stream: MessageStream, plan: list) -> list[tuple[Incoming, list[bytearray]]]:
    awaited = []
    for lengths, seed, known in plan:
        nbytes = sum(lengths)
        memory = [bytearray(size) for size in cut(nbytes, seed)] if known else []
        pieces = [np.frombuffer(each, np.uint8) for each in memory] if known else None
        awaited.append((stream.receive(pieces, nbytes if known else None), memory))
    return awaited


def check(awaited: list, plan: list, salt: int) -> None:
    for number, ((message, memory), (lengths, _, known)) in enumerate(
        zip(awaited, plan, strict=True)
    ):
        assert message.done
        got = b"".join(memory) if known else bytes(message.body)
        assert got == content(sum(lengths), salt + number)


def alongside(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@settings(max_examples=examples(60), deadline=None)
@given(messages, messages, st.integers(1, 5), st.sampled_from([pair, tcp_pair]))
def test_messages_arrive_intact_and_in_order_both_ways(
    there: list, back: list, most: int, connected: Connected
):
    with connected() as (mine, theirs), mock.patch.object(streams, "_MOST_PIECES", most):
        here, other = MessageStream(mine), MessageStream(theirs)
        queue(here, there, 0)
        queue(other, back, 100)
        arriving, awaited = expect(other, there), expect(here, back)
        thread = alongside(lambda: finish([other]))
        finish([here])
        thread.join(SECONDS)
        assert not thread.is_alive()
        check(arriving, there, 0)
        check(awaited, back, 100)
        assert not here.leaving
        assert not other.leaving
        mine.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing more was sent than was asked for
            mine.recv(1)


def test_what_a_message_brings_about_comes_before_the_next():
    with pair() as (mine, theirs):
        here, other = MessageStream(mine), MessageStream(theirs)
        seen: list[str] = []

        def answer() -> None:
            seen.append(bytes(body).decode())
            other.send([b"answer"], 6)

        body = bytearray(8)
        other.receive([memoryview(body)], 8, answer)
        other.receive(None, None, lambda: seen.append("second"))
        here.send([b"question"], 8)
        here.send([], 0)
        reply = here.receive(None, None)
        thread = alongside(lambda: finish([other]))
        finish([here])
        thread.join(SECONDS)
        assert seen == ["question", "second"]
        assert reply.body == b"answer"


def test_several_streams_move_at_once():
    """Each waits for what the other sends only later: none may hold up the others."""
    with pair() as (a, b), pair() as (c, d):
        near, far = [MessageStream(a), MessageStream(c)], [MessageStream(d), MessageStream(b)]
        for stream in (*near, *far):
            stream.send([bytes(200_000)], 200_000)
            stream.receive(None, None)
        thread = alongside(lambda: finish(far))
        finish(near)
        thread.join(SECONDS)
        assert not any(stream.leaving or stream.arriving for stream in (*near, *far))


def test_done_ends_the_wait_while_more_is_expected():
    with pair() as (mine, theirs):
        here, other = MessageStream(mine), MessageStream(theirs)
        other.send([b"x"], 1)
        other.push()
        first, later = here.receive(None, None), here.receive(None, None)
        finish([here], lambda: first.done)
        assert (first.body, later.done) == (b"x", False)


@pytest.mark.parametrize(
    ("sent", "awaited"),
    [
        (struct.pack("<QQ", 1, 3) + b"abc", 3),
        (struct.pack("<QQ", 0, 3) + b"abc", 4),
        (struct.pack("<QQ", 0, 3) + b"abc", 2),
        (struct.pack("<QQ", 0, 0), 2),
        (struct.pack("<QQ", 7, 3) + b"abc", None),
    ],
    ids=["number", "too short", "too long", "empty", "number, any size"],
)
def test_ranks_out_of_step_find_out(sent: bytes, awaited: int | None):
    with pair() as (mine, theirs):
        theirs.sendall(sent)
        stream = MessageStream(mine)
        pieces = None if awaited is None else [memoryview(bytearray(awaited))]
        stream.receive(pieces, awaited)
        with pytest.raises(HorovodInternalError, match="out of step"):
            finish([stream])


def test_ranks_out_of_step_find_out_although_they_wait_for_more():
    """The kernel lets us sleep until as much is there as we expect, which never comes."""
    with tcp_pair() as (mine, theirs), mock.patch.object(streams, "_LOOK_MS", 50):
        stream = MessageStream(mine)
        stream.receive([memoryview(bytearray(100_000))], 100_000)
        stream.set_wake_mark()
        theirs.sendall(struct.pack("<QQ", 0, 3) + b"abc")
        with pytest.raises(HorovodInternalError, match="out of step"):
            finish([stream])


def test_nobody_is_woken_for_a_little_of_a_long_message():
    def is_readable(seconds: float) -> bool:
        return bool(select.select([mine], [], [], seconds)[0])

    with tcp_pair() as (mine, theirs):
        stream = MessageStream(mine)
        long, short = bytearray(10_000), bytearray(3)
        stream.receive([memoryview(long)], len(long))
        stream.receive([memoryview(short)], len(short))
        stream.set_wake_mark()
        theirs.sendall(struct.pack("<QQ", 0, len(long)) + bytes(100))
        assert not is_readable(0.1)
        theirs.sendall(bytes(len(long) - 100))
        assert is_readable(SECONDS)
        stream.pull()
        stream.set_wake_mark()
        theirs.sendall(struct.pack("<QQ", 1, 3) + b"abc")
        assert is_readable(SECONDS)
        finish([stream])
        assert short == b"abc"


def test_the_rest_of_a_message_of_which_some_was_there():
    """Whoever has taken some and sleeps is woken only for as much as the kernel was told."""
    with tcp_pair() as (mine, theirs):
        stream = MessageStream(mine)
        message = stream.receive(None, None)
        theirs.sendall(struct.pack("<QQ", 0, 20))
        stream.pull(0)
        stream.set_wake_mark()
        theirs.sendall(bytes(10))
        mine.recv(1, socket.MSG_PEEK)
        thread = alongside(lambda: stream.pull(0))
        time.sleep(0.2)  # by now it sleeps, most likely
        theirs.sendall(bytes(10))
        thread.join(SECONDS)
        assert not thread.is_alive()
        finish([stream])
        assert message.body == bytes(20)


def test_a_message_that_was_lost_is_noticed():
    with pair() as (mine, theirs):
        here, other = MessageStream(mine), MessageStream(theirs)
        here.send([b"lost"], 4)
        here.leaving.clear()
        here.send([b"next"], 4)
        here.push()
        other.receive(None, None)
        with pytest.raises(HorovodInternalError, match=r"message 1 of 4 bytes .* message 0"):
            finish([other])


@pytest.mark.parametrize("after", [0, 7, 16, 17], ids=["at once", "header", "body", "in the body"])
def test_a_peer_that_has_closed_ends_a_wait_for_its_message(after: int):
    with pair() as (mine, theirs):
        theirs.sendall((struct.pack("<QQ", 0, 9) + bytes(9))[:after])
        stream = MessageStream(mine)
        stream.receive(None, None)
        thread = alongside(theirs.close)
        with pytest.raises(ConnectionResetError):
            finish([stream])
        thread.join(SECONDS)


def test_a_peer_that_has_closed_ends_sending():
    with pair() as (mine, theirs):
        stream = MessageStream(mine)
        stream.send([bytes(1 << 20)], 1 << 20)
        stream.push()
        theirs.close()
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            finish([stream])


def test_a_stream_knows_whether_its_peer_is_awaited():
    with pair() as (mine, theirs):
        stream, peer = MessageStream(mine), MessageStream(theirs)
        assert not stream.awaits_peer(), "nothing is to be moved"
        awaited = stream.receive(None, None)
        assert stream.awaits_peer()
        peer.send([b"hello"], 5)
        peer.push()
        assert not stream.awaits_peer(), "it has arrived, and nobody reads it"
        stream.pull()
        assert awaited.done
        assert not stream.awaits_peer()
        sent = stream.send([bytes(10_000_000)], 10_000_000)
        assert not stream.awaits_peer(), "the kernel would take some of it"
        stream.push()
        assert not sent.done
        assert stream.awaits_peer()
        stream.receive(None, None)
        theirs.close()
        assert not stream.awaits_peer(), "the connection has failed"
