"""Tasks that connect to the driver: who is let in, which ranks they get, and what they must have.

Without Spark: the tasks are connections of this process.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import horovod
from horovod.common.wire import Stream, new_key
from horovod.spark.cluster import Cluster
from horovod.spark.gathering import (
    assign_ranks,
    check_slots,
    check_versions,
    too_few,
)
from horovod.spark.spark_job import shorten
from horovod.spark.task_link import TaskServer, installed_torch
from tests.spark.cluster import until

KEY = new_key()
LONG = 60.0


@pytest.fixture
def server() -> Iterator[TaskServer]:
    server = TaskServer("127.0.0.1", KEY)
    yield server
    server.close()


@contextmanager
def task(server: TaskServer, partition: int, host: str = "a", **more: Any) -> Iterator[Stream]:
    """Connect as a task would."""
    versions = {"horovod": horovod.__version__, "torch": installed_torch()}
    about = {"partition": partition, "attempt": [partition, 0], "host": host, "hostname": host}
    before = len(server.living())
    stream = Stream.connect("127.0.0.1", server.port, KEY, LONG)
    stream.send({**about, "python": "python", "versions": versions, **more}, timeout=LONG)
    until(lambda: len(server.living()) > before)
    yield stream
    stream.close()


def test_strangers_are_not_let_in(server: TaskServer):
    with socket.create_connection(("127.0.0.1", server.port), LONG) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(100) == b""
    with pytest.raises(PermissionError, match="key"):
        Stream.connect("127.0.0.1", server.port, new_key(), LONG)
    with task(server, 0):
        assert list(server.newest()) == [0]


def test_ranks_of_a_host_are_neighbours(server: TaskServer):
    with task(server, 1, "b"), task(server, 3, "a"), task(server, 0, "b"), task(server, 2, "a"):
        ranks = assign_ranks(list(server.newest().values()))
    found = [(link.info.partition, slot.hostname, slot.rank) for link, slot in ranks]
    assert found == [(0, "b", 0), (1, "b", 1), (2, "a", 2), (3, "a", 3)]
    assert [slot.local_rank for _, slot in ranks] == [0, 1, 0, 1]
    assert ranks[2][0].name == "a (Spark task 2)"


def test_the_newest_living_attempt_of_a_task_counts(server: TaskServer):
    with task(server, 0, attempt=[7, 0]):
        with task(server, 0, attempt=[9, 1]):
            assert server.newest()[0].info.attempt == (9, 1)
            assert len(server.living()) == 2
        until(lambda: len(server.living()) == 1)
        assert server.newest()[0].info.attempt == (7, 0)
        assert server.partitions() == {0}


def test_tasks_are_told_the_end(server: TaskServer):
    with task(server, 0) as stream:
        server.newest()[0].end("again")
        assert stream.receive(LONG).header == {"end": "again"}


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch": None}, "the executor on far has no torch for /bin/python"),
        ({"torch": "1.0.0"}, "the executor on far has torch 1.0.0 .* the driver has torch"),
        ({"horovod": "0.28.1"}, "the executor on far has Horovod 0.28.1 and the driver"),
        ({"problem": "nothing works"}, "the executor on far: nothing works"),
    ],
)
def test_what_executors_must_have(server: TaskServer, versions: dict[str, Any], message: str):
    good = {"horovod": horovod.__version__, "torch": f"{installed_torch()}"}
    build = {**good, "torch": good["torch"].partition("+")[0] + "+another.build"}
    with (
        task(server, 0, versions=build),
        task(server, 1, hostname="far", python="/bin/python", versions={**good, **versions}),
    ):
        infos = [link.info for link in server.living()]
    check_versions(infos[:1], horovod.__version__)
    with pytest.raises(RuntimeError, match=message):
        check_versions(infos, horovod.__version__)


def test_messages_of_spark_without_its_stack():
    said = """An error occurred while calling z:org.apache.spark.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 failed 4 times
PythonException: Traceback (most recent call last):
  File "x.py", line 1, in f
ValueError: a reason
 SQLSTATE: 38000
\tat org.apache.spark.api.python.PythonRunner.read(PythonRunner.scala:1)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abort(DAGScheduler.scala:2)
"""
    assert shorten(said).splitlines() == [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "ValueError: a reason",
    ]
    assert shorten("Job 3 cancelled\n\tat java.lang.Thread.run") == "Job 3 cancelled"


class BrokenJava:
    """A SparkContext whose Java side fails at every question: classes of it are missing."""

    master = "spark://host:7077"
    defaultParallelism = 2

    def getConf(self) -> dict[str, str]:
        return {"spark.driver.host": "127.0.0.1"}

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("java.lang.NoClassDefFoundError: com/google/protobuf/MessageOrBuilder")


def test_what_spark_does_not_tell_ends_no_job():
    cluster = Cluster(BrokenJava())
    assert cluster.slots is None
    check_slots(cluster, 5)
    said = too_few(cluster, 5, 1, 600.0)
    assert "The cluster offers an unknown number of slots. Ask for fewer processes" in said
