"""Elastic jobs across hosts with an sshd each: a host that is cut off."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multihost.ssh_hosts import SshHosts, available

HANG = 240.0  # a cut cable takes its time to be noticed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    hosts = SshHosts(tmp_path_factory.mktemp("cluster"))
    yield hosts
    hosts.close()


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == kind]


def await_all(path: Path, size: int) -> dict[str, tuple[str, int]]:
    """Until `size` workers have met: their hosts and ranks. The job may begin with fewer."""
    deadline = time.monotonic() + HANG
    while True:
        formed = [event["decision"] for event in events(path, "formed")]
        for decision in events(path, "decision"):
            if decision["number"] in formed and len(decision["workers"]) == size:
                return decision["workers"]
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "no status"
        time.sleep(0.05)  # between looks at a file


def test_a_host_that_is_cut_off_is_left_behind_and_ends_itself(cluster: SshHosts, tmp_path: Path):
    """Never two rank 0s: the worker on the other side of the cut does not go on alone.

    It is rank 0, unless its host was the last to start.
    """
    status = tmp_path / "status"
    plan = {"steps": 30, "largest": 3, "size": 2, "silence": 5}
    options = ["-np", "3", "--min-np", "1", "-H", "host2:1,host0:1,host1:1"]
    options += ["--max-worker-failures", "1", "--status-file", str(status)]
    worker = [sys.executable, "-m", "tests.elastic.light_worker", json.dumps(plan)]
    launcher = cluster.start(*options, *worker)
    try:
        workers = await_all(status, 3)
        (event,) = [e for e in events(status, "started") if e["host"] == "host2"]
        process = os.pidfd_open(event["pid"])
        cluster.hosts.cut(2)
        try:
            stdout, stderr = launcher.communicate(timeout=HANG)
            assert launcher.returncode == 0, stdout.decode() + stderr.decode()
            ends = re.findall(r"end \d+ \S+ worker (w\d)", stdout.decode())
            assert len(ends) == 2, stdout.decode() + stderr.decode()
            assert event["worker"] not in ends
            assert select.select([process], [], [], HANG)[0], "the worker that was cut off is left"
        finally:
            cluster.hosts.heal(2)
            os.close(process)
        rank = workers[event["worker"]][1]
        assert f"{event['worker']} (rank {rank}, host2) failed: " in stderr.decode()
    finally:
        launcher.kill()
        launcher.communicate()
