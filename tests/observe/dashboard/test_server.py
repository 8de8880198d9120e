"""The HTTP side: who gets in, what they get, and what nobody can do to the launcher."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp")

from aiohttp.test_utils import make_mocked_request

from horovod.observe.dashboard import dashboard, page, server
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.logs import OutputTails
from horovod.observe.dashboard.server import Connections, Guarded
from horovod.runner.output.lines import Line
from tests.observe.dashboard.served import HANG, TOKEN, Served, served

pytestmark = pytest.mark.usefixtures("never_silent")
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PATHS = [
    "/",
    "/changes",
    "/output?worker=0",
    "/rank?worker=0",
    "/metrics",
    "/nothing",
    "/..%2f..%2fetc/passwd",
]


@pytest.fixture(scope="module")
def job() -> Iterator[Served]:
    with served() as found:
        found.train()
        found.wait_for(lambda board: board["job"]["step"] == 10)
        yield found


# -- the token -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": "horovod_dashboard=x"},
    ],
)
def test_without_the_token_there_is_403_and_nothing_else(job: Served, path: str, headers):
    status, found, body = job.get(path, headers)
    assert (status, body) == (403, b"")
    assert "set-cookie" not in found


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_token_in_the_link(job: Served, path: str):
    mark = "&" if "?" in path else "?"
    for token in ("wrong", "", TOKEN + "x", "%00", "é"):
        query = token.encode().hex() if token == "é" else token
        assert job.get(f"{path}{mark}token={query}")[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_nobody_can_do_anything_but_read(job: Served, method: str):
    assert job.get("/", method=method)[0] == 403
    assert job.get("/", BEARER, method=method)[0] == 405


def test_the_link_opens_the_page_and_leaves_a_cookie(job: Served):
    status, headers, body = job.get(f"/?token={TOKEN}")
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert TOKEN.encode() not in body
    cookie = headers["set-cookie"]
    assert TOKEN not in cookie
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    visit = {"Cookie": cookie.partition(";")[0]}
    assert job.get("/", visit)[0] == 200
    assert job.get("/changes", visit)[0] == 200
    assert job.get("/changes", {"Cookie": visit["Cookie"] + "0"})[0] == 403
    assert job.get("/changes", {"Cookie": f"horovod_dashboard_{job.port}={TOKEN}"})[0] == 403


def test_the_token_in_a_link_is_for_the_page_and_for_scrapes_only(job: Served):
    assert job.get(f"/metrics?token={TOKEN}")[0] == 200
    assert job.get(f"/changes?token={TOKEN}")[0] == 403


def test_headers_keep_the_page_to_itself(job: Served):
    _, headers, _ = job.get("/", BEARER)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "python" not in headers["server"].lower()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost:8470", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8470", 200),
        ("10.1.2.3:8470", 200),
        ("evil.example:8470", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_names_that_others_lead_here_are_refused(job: Served, host: str, expected: int):
    assert job.get("/", {**BEARER, "Host": host})[0] == expected


def test_the_history_of_one_rank(job: Served):
    found = job.ask("/rank?worker=1")
    assert found["steps"]["rows"]
    assert found["stack"] is None
    assert job.ask(f"/rank?worker=1&since={10**9}")["steps"]["rows"], "it knows nothing right"
    assert job.ask("/rank?worker=77")["steps"] is None
    assert job.get(f"/rank?worker={'9' * 20}", BEARER)[0] == 400


@pytest.mark.parametrize(
    "query", ["since=x", "since=-1", "since=1e3", "event=", "since=" + "9" * 99]
)
def test_wrong_numbers_are_refused(job: Served, query: str):
    status, _, body = job.get(f"/changes?{query}", BEARER)
    assert (status, body) == (400, b"")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff\x00\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_request_disturbs_nobody(job: Served, raw: bytes):
    with socket.create_connection(("127.0.0.1", job.port), timeout=HANG) as sock:
        try:
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(100)
        except OSError:
            answer = b""
    assert b" 200 " not in answer
    assert job.ask("/changes")["job"]["size"] == 3


# -- what they get ---------------------------------------------------------------------------


def test_changes_are_awaited_and_are_only_what_is_new():
    with served() as job:
        job.train()
        first = job.wait_for(lambda board: board["job"]["step"] == 10)
        version = first["version"]
        job.train()
        found = job.ask(f"/changes?since={version}")
        assert found["version"] > version
        assert not found["full"]


def test_a_question_is_held_until_there_is_news():
    with served() as job:
        job.dashboard.note("blacklisted", message="an event")  # which nobody has asked for
        version = job.wait_for(lambda board: board.get("events"))["version"]
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(job.ask(f"/changes?since={version}"))
        )
        asking.start()
        asking.join(1.5)  # three times as long as the board takes to be brought up to date
        assert answers == []
        job.train()
        asking.join(HANG)
        assert answers[0]["version"] > version


def test_output_of_a_worker():
    with served() as job:
        job.dashboard.output(1, 1, "stdout", [Line(b"one", b"\n"), Line(b"bar", b"\r")])
        job.dashboard.output(1, 1, "stderr", [Line(b"\x1b[31mtwo\x1b[0m <b>", b"\n")])
        assert job.ask("/output?worker=1") == {
            "lines": [[1, "stdout", "one"], [2, "stderr", "two <b>"]]
        }
        assert job.ask("/output?worker=1&since=1") == {"lines": [[2, "stderr", "two <b>"]]}
        assert job.ask("/output?worker=7") == {"lines": []}
        for number in range(1000):
            job.dashboard.output(1, 1, "stdout", [Line(b"%d " % number * 1000, b"\n")])
        lines = job.ask("/output?worker=1")["lines"]
        assert len(lines) == 200
        assert max(len(line) for _, _, line in lines) == 400


def test_a_page_that_is_open_learns_of_the_end():
    job = Served()
    job.train()
    found = job.wait_for(lambda board: board["job"]["step"] == 10)
    with socket.create_connection(("127.0.0.1", job.port), timeout=HANG) as sock:
        # Held by the server, since nothing is new.
        query = f"since={found['version'] + 1_000_000}&page=1"
        sock.sendall(f"GET /changes?{query} HTTP/1.1\r\nHost: localhost\r\n".encode())
        sock.sendall(f"Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert b"200 OK" in sock.recv(100_000)
        query = f"since={job.ask('/changes')['version']}&page=1"
        sock.sendall(f"GET /changes?{query} HTTP/1.1\r\nHost: localhost\r\n".encode())
        sock.sendall(f"Authorization: Bearer {TOKEN}\r\nAccept-Encoding: identity\r\n\r\n".encode())
        job.dashboard.close()
        answer = b""
        while chunk := sock.recv(100_000):
            answer += chunk
        assert b"200 OK" in answer
    with pytest.raises(OSError):
        job.get("/", BEARER)


def test_a_page_between_two_questions_learns_of_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_FAREWELL", HANG)
    monkeypatch.setattr(dashboard, "_PATIENCE", HANG)
    job = Served()
    job.train()
    job.wait_for(lambda board: board["job"]["step"] == 10)
    job.ask("/changes?page=7")
    job.ask("/changes?page=0")  # no page: nobody waits for that
    closing = threading.Thread(target=job.dashboard.close)
    closing.start()
    closing.join(1)  # as long as a page may take between an answer and the next question
    assert closing.is_alive()
    assert job.ask("/changes?page=7")["job"]["ended"]
    closing.join(HANG)
    assert not closing.is_alive()


def test_a_question_that_begins_to_wait_at_the_end_is_answered():
    async def ask_and_finish() -> bool:
        board = Board("train.py", time.time(), 1.0, elastic=False)
        listener = socket.create_server(("127.0.0.1", 0))
        found = server.Server(board, OutputTails(), TOKEN, listener)
        request = make_mocked_request("GET", f"/changes?since={board.version}")
        question = asyncio.ensure_future(found._changes(request))
        await asyncio.sleep(0)  # now it is about to wait
        board.end(0, "", "", time.time())
        await found.finish()
        listener.close()
        return question.done()

    assert asyncio.run(ask_and_finish())


def test_nobody_waits_for_a_page_that_was_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dashboard, "_PATIENCE", HANG)
    job = Served()
    job.train()
    job.wait_for(lambda board: board["job"]["step"] == 10)
    job.ask("/changes?page=7")
    closing = threading.Thread(target=job.dashboard.close)
    closing.start()
    closing.join(HANG)
    assert not closing.is_alive()


# -- escaping --------------------------------------------------------------------------------

HOSTILE = "</script><script>alert(1)</script><!--\"'&`\\\n{{saved}}{{script}}\u2028"


def test_hostile_strings_stay_data_in_the_saved_page(tmp_path):
    path = tmp_path / "saved.html"
    with served(save=str(path)) as job:
        job.train(rank1={"host": HOSTILE, "metrics": {HOSTILE: [[1, 2.0]]}})
        job.dashboard.note("blacklisted", message=HOSTILE)
        job.dashboard.output(1, 1, "stdout", [Line(HOSTILE.encode(), b"\n")])
        job.wait_for(lambda board: board["job"]["step"] == 10)
    text = path.read_text()
    # The same elements as a page without any data.
    assert re.findall("<[a-z/!]+", text) == re.findall("<[a-z/!]+", page.render())
    saved = json.loads(re.search(r'id="saved">(.*?)</script>', text, re.DOTALL)[1])
    shown = HOSTILE.replace("\n", " ").replace("\u2028", " ")
    assert saved["output"]["1"][0][2] == shown
    assert shown[:80] in saved["board"]["metrics"]
    assert saved["board"]["events"][-1]["text"] == shown
    assert path.stat().st_mode & 0o077 == 0


def test_the_saved_page_is_complete_without_a_server(tmp_path):
    path = tmp_path / "saved.html"
    with served(save=str(path)) as job:
        job.train()
        job.wait_for(lambda board: board["job"]["step"] == 10)
    text = path.read_text()
    assert "src=" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy == page.policy()


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with served(save=str(folder / "saved.html")) as job:
        folder.rmdir()
    assert "could not be saved" in job.said[-1]


# -- many, slow and silent readers -----------------------------------------------------------


def test_a_thousand_connections():
    """As many as the limit allows stay; the owner always gets in; the job's reports go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process may have no more than {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    try:
        with served() as job:
            request = (
                f"GET /changes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            ).encode()
            clients = []
            for _ in range(1000):
                sock = socket.create_connection(("127.0.0.1", job.port), timeout=HANG)
                sock.sendall(request)
                clients.append(sock)
            answered = sum(b"200 OK" in sock.recv(1000) for sock in clients)
            assert answered == 1000
            job.train()
            assert job.wait_for(lambda board: board["job"]["step"] == 10)
            for sock in clients:
                sock.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_leave_most_descriptors_to_the_job(monkeypatch: pytest.MonkeyPatch):
    limit = resource.RLIMIT_NOFILE
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096) if what == limit else 0)
    assert server.most_connections() == 256


def guarded(limits: Connections, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    class Inner:
        def __getattr__(self, name: str):
            return lambda *_: None

    found = Guarded(Inner(), limits)
    monkeypatch.setattr(found, "abort", lambda: limits.forget(found))
    found.connection_made(None)  # type: ignore[arg-type]
    return found


def test_the_one_that_was_idle_longest_makes_room(monkeypatch: pytest.MonkeyPatch):
    limits = Connections(most=3)
    first, second, third = (guarded(limits, monkeypatch) for _ in range(3))
    first.data_received(b"x")
    fourth = guarded(limits, monkeypatch)
    assert list(limits._open) == [third, first, fourth]
    assert limits.refused == 1
    second.connection_lost(None)
    assert len(limits) == 3


def test_silent_and_slow_peers_are_dropped(monkeypatch: pytest.MonkeyPatch):
    limits = Connections(most=9)
    _silent, idle, slow, good = (guarded(limits, monkeypatch) for _ in range(4))
    for each in (idle, slow, good):
        each.data_received(b"x")
    slow.pause_writing()
    good.pause_writing()
    good.resume_writing()
    now = time.monotonic()
    limits.expire(now + 5)
    assert len(limits) == 4
    limits.expire(now + 15)
    assert list(limits._open) == [idle, good]
    limits.expire(now + 100)
    assert len(limits) == 0


def test_a_reader_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_SLOW", 0.2)
    with served(size=128) as job:
        job.train(50)
        job.wait_for(lambda board: board["job"]["step"] == 50)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.settimeout(HANG)
            sock.connect(("127.0.0.1", job.port))
            # Asked for again and again, and never read: the launcher must not keep it all.
            ask = f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            with pytest.raises(OSError):  # noqa: PT012
                while True:
                    sock.sendall(ask.encode() * 10)
                    time.sleep(0.01)
        assert job.ask("/changes")["job"]["size"] == 128
