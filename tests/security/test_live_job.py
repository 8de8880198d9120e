"""Attacks on a job that trains: it must neither obey, nor tell anything, nor even stumble."""

from __future__ import annotations

import base64
import os
import pickle
import random
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from horovod.common.wire import Session, decode_key
from tests.security.live_job import LiveJob, start, train_alone

FRAMES = 10_000
AT_ONCE = 200


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    with start(tmp_path_factory.mktemp("job") / "live") as job:
        yield job


class Payload:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def answer(sock: socket.socket) -> bytes:
    """All that the other side says until it hangs up."""
    said = b""
    try:
        while data := sock.recv(4096):
            said += data
    except ConnectionError:
        pass
    return said


def family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            pass
    return found


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses, as the kernel writes them, and ports at which these processes wait."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            state, inode = fields[3], fields[9]
            if inode in inodes and state in ("0A", "07"):  # TCP listens, UDP is bound
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def test_only_the_store_listens_and_only_on_loopback(job: LiveJob):
    launcher, *others = family(job.process.pid)
    assert len(others) >= 3, "an agent and two workers"
    loopback = f"{struct.unpack('<I', socket.inet_aton('127.0.0.1'))[0]:08X}"
    assert job.address == "127.0.0.1"
    assert listening([launcher]) == {(loopback, job.port)}
    # So there is no worker notification service to send a pickle to, and no other either.
    assert listening(others) == set()


@pytest.mark.parametrize("encode", [bytes, base64.b64encode], ids=["raw", "base64"])
@pytest.mark.parametrize("target", ["/worker_addresses/0", "/runfunc/func", "/global/0"])
def test_a_pickle_put_over_http_is_never_loaded(job: LiveJob, tmp_path: Path, encode, target: str):
    trap = tmp_path / "pwned"
    body = encode(pickle.dumps(Payload(trap)))
    head = f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with job.connect() as sock:
        sock.sendall(head + body)
        assert answer(sock) == b""
    assert not trap.exists()
    pickle.loads(pickle.dumps(Payload(trap)))
    assert trap.exists(), "the trap itself works"


def test_a_pickle_in_the_frame_of_the_old_services_is_never_loaded(job: LiveJob, tmp_path: Path):
    body = pickle.dumps(Payload(tmp_path / "pwned"))
    with job.connect() as sock:
        sock.sendall(bytes(32) + struct.pack("i", len(body)) + body)
        assert answer(sock) == b""
    assert not (tmp_path / "pwned").exists()


def test_ten_thousand_random_frames(job: LiveJob):
    chance = random.Random(20)
    key = decode_key(job.key())
    for number in range(FRAMES):
        with job.connect() as sock:
            if number % 10 == 9:
                send_as_insider(sock, key, chance)
            else:
                sock.sendall(stranger(chance))
    job.train_on()
    warned = [int(count) for count in re.findall(r"\((\d+) so far\)", job.errors())]
    assert max(warned) >= FRAMES // 10  # now and then,
    assert len(warned) <= 6  # not for each
    told = "".join(job.output)
    assert told.count("store: dropped 127.0.0.1:") >= FRAMES
    for reason in ("speaks version", "limit is", "closed by the peer", "does not speak"):
        assert reason in told


def stranger(chance: random.Random) -> bytes:
    """What somebody without the key may send."""
    hello = Session(bytes(32), server=False).take_output()
    noise = chance.randbytes(chance.randrange(1, 300))
    return chance.choice(
        [
            noise,  # garbage
            hello[: chance.randrange(1, len(hello))],  # truncated
            hello[:4] + bytes([chance.randrange(256)]) + noise,  # another version
            hello + noise,  # a wrong proof, or too little of one
            b"GET / HTTP/1.1\r\n" + noise,
            bytes(chance.randrange(1, 2000)),
        ]
    )


def send_as_insider(sock: socket.socket, key: bytes, chance: random.Random) -> None:
    """A damaged frame of somebody who has the key, such as a rank behind a bad network card."""
    session = Session(key, server=False)
    sock.sendall(session.take_output())
    while not session.established:
        session.feed(sock.recv(4096))
    sock.sendall(session.take_output())
    good = session.seal({"op": "set", "key": "fuzz"}, chance.randbytes(20))
    position = chance.randrange(len(good))
    flipped = good[:position] + bytes([good[position] ^ 1 << chance.randrange(8)])
    bad = chance.choice(
        [
            flipped + good[position + 1 :],
            good[:position],
            chance.randbytes(100),
            struct.pack("!II", 0xFFFFFFFF, chance.getrandbits(32)),  # oversized
            session.seal({"op": chance.choice(["", "set", "rm"])}),  # out of order and senseless
        ]
    )
    sock.sendall(bad)


def test_two_hundred_connections_at_once_that_say_little_or_nothing(job: LiveJob):
    hello = Session(bytes(32), server=False).take_output()
    with ExitStack() as stack:
        slow = [stack.enter_context(job.connect()) for _ in range(AT_ONCE)]
        for number, sock in enumerate(slow):
            sock.sendall(hello[: number % len(hello)])
        job.train_on()  # ranks meet anew while all of them wait
        for sock in slow[::2]:
            sock.sendall(b"!" * 100)
            assert len(answer(sock)) <= 69, "no more than a challenge"
        job.train_on()


def test_a_recorded_exchange_cannot_be_played_again(job: LiveJob):
    session = Session(decode_key(job.key()), server=False)
    sent = [session.take_output()]
    with job.connect() as sock:
        sock.sendall(sent[0])
        while not session.established:
            session.feed(sock.recv(4096))
        sent += [session.take_output(), session.seal({"op": "add", "key": "paid", "amount": 1})]
        sock.sendall(sent[1] + sent[2])
        assert session.feed(sock.recv(4096))[0].header == {"total": 1}
        sock.sendall(sent[2])
        assert answer(sock) == b"", "not in the same connection"
    with job.connect() as sock:
        sock.sendall(b"".join(sent))
        assert len(answer(sock)) <= 69, "nor in another"
    job.train_on()
    told = "".join(job.output)
    assert "a frame failed authentication: damaged, repeated or forged" in told
    assert "the client does not know this job's key" in told


def test_the_key_is_where_it_is_needed_and_nowhere_else(job: LiveJob):
    key = job.key().encode()
    workers = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert key not in (folder / "cmdline").read_bytes()
            if key in (folder / "environ").read_bytes():
                workers.add(int(folder.name))
        except OSError:
            continue  # ended, or not ours to read
    _, *others = family(job.process.pid)
    assert workers, "it is in the environment of the workers"
    assert workers <= set(others)
    for pid in workers:
        assert b"tests.security.live_job" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_job_ends_with_the_right_result(job: LiveJob):
    weights = job.finish()
    assert len(weights) == 2
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], train_alone(job.rounds), rtol=1e-9, atol=1e-9)
    written = [path for path in (job.folder / "logs").rglob("*") if path.is_file()]
    assert any(path.name.startswith("timeline") for path in written)
    for text in [job.errors(), *job.output, *(path.read_text() for path in written)]:
        assert job.key() not in text
    assert "Traceback" not in job.errors()
