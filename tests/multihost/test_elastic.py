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

HANG = 100.0  # a cut cable takes its time to be noticed


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


def await_event(path: Path, kind: str) -> dict[str, Any]:
    deadline = time.monotonic() + HANG
    while not (found := events(path, kind)):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "no status"
        time.sleep(0.05)  # between looks at a file
    return found[0]


def test_a_host_that_is_cut_off_is_left_behind_and_ends_itself(cluster: SshHosts, tmp_path: Path):
    """Never two rank 0s: the worker on the other side of the cut does not go on alone."""
    status = tmp_path / "status"
    plan = {"steps": 30, "size": 2, "silence": 2}
    options = ["-np", "3", "--min-np", "1", "-H", "host2:1,host0:1,host1:1"]
    options += ["--max-worker-failures", "1", "--status-file", str(status)]
    worker = [sys.executable, "-m", "tests.elastic.light_worker", json.dumps(plan)]
    launcher = cluster.start(*options, *worker)
    try:
        await_event(status, "formed")
        (event,) = [e for e in events(status, "started") if e["host"] == "host2"]
        rank_0 = os.pidfd_open(event["pid"])
        cluster.hosts.cut(2)
        try:
            stdout, stderr = launcher.communicate(timeout=HANG)
            assert launcher.returncode == 0, stdout.decode() + stderr.decode()
            ends = re.findall(r"end \d+ \S+ worker (w\d)", stdout.decode())
            assert len(ends) == 2, stdout.decode() + stderr.decode()
            assert event["worker"] not in ends
            assert select.select([rank_0], [], [], HANG)[0], "the worker that was cut off is left"
        finally:
            cluster.hosts.heal(2)
            os.close(rank_0)
        assert f"{event['worker']} (rank 0, host2) failed: " in stderr.decode()
    finally:
        launcher.kill()
        launcher.communicate()
