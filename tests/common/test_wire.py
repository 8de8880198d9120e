"""The authenticated protocol, attacked."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common import wire
from horovod.common.wire import Message, Session, Stream, WireError, decode_key, encode_key, new_key
from tests.effort import examples

KEY = bytes(range(32))
HELLO_BYTES = 37
TAG_BYTES = 32

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
HEADERS = st.dictionaries(st.text(max_size=10), JSON, max_size=4)


def open_pair(key: bytes = KEY, **options: Any) -> tuple[Session, Session]:
    """A client's and a server's session after their handshake."""
    client, server = Session(key, server=False, **options), Session(key, server=True, **options)
    server.feed(client.take_output())
    client.feed(server.take_output())
    server.feed(client.take_output())
    assert client.established
    assert server.established
    return client, server


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(HEADERS, st.binary(max_size=300)), max_size=3), st.data())
def test_messages_survive_any_fragmentation(
    messages: list[tuple[dict[str, Any], bytes]], data: st.DataObject
) -> None:
    client, server = open_pair()
    stream = b"".join(client.seal(header, body) for header, body in messages)
    received = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += server.feed(stream[:cut])
        stream = stream[cut:]
    assert received == [Message(header, body) for header, body in messages]
    assert server.between_frames


@given(st.integers(1, 200))
def test_handshake_survives_any_fragmentation(step: int) -> None:
    client, server = Session(KEY, server=False), Session(KEY, server=True)
    for source, target in ((client, server), (server, client), (client, server)):
        data = source.take_output()
        for start in range(0, len(data), step):
            target.feed(data[start : start + step])
    assert server.feed(client.seal({"a": 1})) == [Message({"a": 1})]
    assert client.feed(server.seal({"b": 2})) == [Message({"b": 2})]


def test_both_directions_and_empty_body() -> None:
    client, server = open_pair()
    assert server.feed(client.seal({})) == [Message({}, b"")]
    assert client.feed(server.seal({"x": "ü"}, b"\0")) == [Message({"x": "ü"}, b"\0")]


def test_client_notices_another_key_and_does_not_prove_its_own() -> None:
    client, server = Session(KEY, server=False), Session(new_key(), server=True)
    server.feed(client.take_output())
    with pytest.raises(PermissionError, match="key differ"):
        client.feed(server.take_output())
    assert client.take_output() == b""
    assert not client.established


def test_server_refuses_a_client_that_only_pretends() -> None:
    client, server = Session(KEY, server=False), Session(KEY, server=True)
    server.feed(client.take_output())
    with pytest.raises(PermissionError, match="does not know"):
        server.feed(bytes(TAG_BYTES))
    assert not server.established


def test_reflected_proof_is_no_proof() -> None:
    server = Session(KEY, server=True)
    server.feed(Session(KEY, server=False).take_output())
    answer = server.take_output()
    with pytest.raises(PermissionError):
        server.feed(answer[-TAG_BYTES:])


def test_replayed_handshake_is_refused() -> None:
    client, server = Session(KEY, server=False), Session(KEY, server=True)
    hello = client.take_output()
    server.feed(hello)
    client.feed(server.take_output())
    proof = client.take_output()
    another = Session(KEY, server=True)
    another.feed(hello)
    with pytest.raises(PermissionError):
        another.feed(proof)


def test_replayed_frame_is_refused() -> None:
    client, server = open_pair()
    frame = client.seal({"n": 1})
    assert len(server.feed(frame)) == 1
    with pytest.raises(WireError, match="repeated"):
        server.feed(frame)


def test_reordered_frames_are_refused() -> None:
    client, server = open_pair()
    client.seal({"n": 1})
    with pytest.raises(WireError, match="authentication"):
        server.feed(client.seal({"n": 2}))


def test_frame_of_another_session_is_refused() -> None:
    client, _ = open_pair()
    _, server = open_pair()
    with pytest.raises(WireError, match="authentication"):
        server.feed(client.seal({"n": 1}))


def test_reflected_frame_is_refused() -> None:
    client, _ = open_pair()
    with pytest.raises(WireError, match="authentication"):
        client.feed(client.seal({"n": 1}))


@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    client, server = open_pair(max_frame=1000)
    frame = bytearray(client.seal({"key": "value"}, b"body"))
    position = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[position // 8] ^= 1 << position % 8
    try:
        # A length that grew makes the frame incomplete, which is no message either.
        assert server.feed(bytes(frame)) == []
    except WireError:
        pass


def test_cut_frame_is_no_message_and_shows_at_the_end() -> None:
    client, server = open_pair()
    frame = client.seal({"n": 1}, b"body")
    assert server.feed(frame[:-1]) == []
    assert not server.between_frames


def test_oversized_frame_is_refused_before_it_arrives() -> None:
    _, server = open_pair(max_frame=1000)
    with pytest.raises(WireError, match="limit is 1000"):
        server.feed(struct.pack("!II", 2, 999))


def test_oversized_message_is_refused_before_it_is_sent() -> None:
    client, server = open_pair(max_frame=1000)
    with pytest.raises(ValueError, match="larger than the limit"):
        client.seal({}, bytes(1001))
    assert len(server.feed(client.seal({}, bytes(990)))) == 1


@given(st.binary(min_size=5, max_size=200).filter(lambda data: data[:4] != b"HVDW"))
def test_garbage_is_refused_at_once(data: bytes) -> None:
    for server in (True, False):
        with pytest.raises(WireError, match="does not speak"):
            Session(KEY, server=server).feed(data)


def test_another_version_is_named_on_both_sides() -> None:
    client, server = Session(KEY, server=False), Session(KEY, server=True)
    hello = client.take_output()
    with pytest.raises(WireError, match="version 9"):
        server.feed(hello[:4] + b"\x09" + hello[5:])
    answer = server.take_output()
    assert answer == hello[:5]
    with pytest.raises(WireError, match="version 9"):
        client.feed(answer[:4] + b"\x09")


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 20000])
def test_header_must_be_a_json_object(text: bytes) -> None:
    client, server = open_pair()
    lengths = struct.pack("!II", len(text), 0)
    tag = wire._tag(client._sender, struct.pack("!Q", 0), lengths + text)
    with pytest.raises(WireError, match="header is not"):
        server.feed(lengths + text + tag)


def test_nothing_can_be_sent_before_the_handshake() -> None:
    with pytest.raises(WireError, match="handshake"):
        Session(KEY, server=False).seal({})


def test_key_text() -> None:
    assert decode_key(encode_key(KEY)) == KEY
    for text in ("", "c2hvcnQ=", "not base64!", encode_key(KEY) + "AAAA"):
        with pytest.raises(ValueError) as caught:
            decode_key(text)
        assert not text or text not in str(caught.value)
    with pytest.raises(ValueError, match="32 bytes"):
        Session(b"short", server=True)


def test_key_is_not_shown() -> None:
    client, _ = open_pair()
    for session in (client, Session(KEY, server=True)):
        assert repr(KEY)[2:-1] not in repr(session)
        assert "key" not in repr(session).lower()
    assert client._key == b"", "the job's key is not needed after the handshake"


def test_stream_reports_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(TimeoutError):
            Stream.connect("127.0.0.1", port, KEY, timeout=0.1)


def test_stream_reports_a_server_that_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ConnectionError):
            Stream.connect("127.0.0.1", listener.getsockname()[1], KEY, timeout=60)
        thread.join()
