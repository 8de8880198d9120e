"""Hosts that come and go while the job runs. A stub stands in for ssh."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.elastic.launched import Launched
from tests.runner.stub_ssh import install


class Cluster:
    """The hosts that a discovery script finds, as the test wants them."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        self._list = folder / "hosts"
        self.script = folder / "discover"
        self.set(*hosts)
        self.script.write_text(f"#!/bin/sh\ncat {self._list}\n")
        self.script.chmod(0o755)
        self.env = install(folder)

    def set(self, *hosts: str) -> None:
        new = self._list.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self._list)

    def break_down(self) -> None:
        """The script fails from now on."""
        self._list.unlink()

    def options(self, num_proc: int, min_np: int) -> list[str]:
        script = ["--host-discovery-script", str(self.script)]
        return ["-np", str(num_proc), "--min-np", str(min_np), *script]


def hosts_of(job: Launched) -> list[list[str]]:
    """For each decision, the hosts in the order of ranks."""
    found = []
    for event in job.events("decision"):
        places = sorted(event["workers"].values(), key=lambda place: place[1])
        found.append([host for host, _ in places])
    return found


def test_a_host_is_added_while_training(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:2")
    plan = {"steps": 10, "size": 3}
    with Launched(tmp_path, cluster.options(2, 1), plan, env=cluster.env) as job:
        job.await_event("formed")
        cluster.set("alpha:2", "beta:1")
        job.check_success(size=3)
        assert hosts_of(job) == [["alpha"] * 2, ["alpha", "alpha", "beta"]]
        assert not job.events("failed")


def test_a_host_is_removed_while_training(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:1", "beta:2")
    plan = {"steps": 10, "size": 1}
    with Launched(tmp_path, cluster.options(3, 1), plan, env=cluster.env) as job:
        job.await_event("formed")
        cluster.set("alpha:1")
        job.check_success(size=1)
        assert not job.events("failed")
        assert "1 worker: beta is not available any more" in job.errors


def test_all_hosts_are_exchanged_and_the_state_is_kept(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:1")
    plan = {"steps": 100000, "commit_every": 5, "faults": {"w1": ["step", 10, "exit 0"]}}
    with Launched(tmp_path, cluster.options(1, 1), plan, env=cluster.env) as job:
        job.await_event("formed")
        cluster.set("beta:1")
        assert job.wait() == 0, str(job)
        assert hosts_of(job) == [["alpha"], ["alpha", "beta"], ["beta"]]
        assert "begin at 0 worker w1" not in job.output, "it has received the state"
        assert not job.events("failed")


def test_fewer_slots(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:2", "beta:1")
    plan = {"steps": 10, "size": 2}
    with Launched(tmp_path, cluster.options(3, 1), plan, env=cluster.env) as job:
        job.await_event("formed")
        cluster.set("alpha:1", "beta:1")
        job.check_success(size=2)
        assert hosts_of(job)[-1] == ["alpha", "beta"]


def test_waiting_for_enough_slots(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:1")
    with Launched(tmp_path, cluster.options(3, 2), {}, env=cluster.env) as job:
        waiting = job.await_event("waiting")
        assert waiting["message"] == (
            "waiting up to 600 s for hosts: the job needs 3 slots to begin, and 1 is offered "
            "(alpha:1)"
        )
        assert not job.events("started")
        cluster.set("alpha:1", "beta:2")
        job.check_success(size=3)


def test_never_enough_slots(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:1")
    options = [*cluster.options(3, 2), "--elastic-timeout", "1"]
    with Launched(tmp_path, options, {}, env=cluster.env) as job:
        assert job.wait() == 1
        assert "gave up after 1 s (--elastic-timeout): the job needs 3 slots" in job.errors


def test_below_the_minimum_until_a_host_comes(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:1", "beta:1")
    plan = {"steps": 20, "host_faults": {"beta": ["step", 5, "SIGKILL"]}}
    options = [*cluster.options(2, 2), "--max-worker-failures", "1"]
    with Launched(tmp_path, options, plan, env=cluster.env) as job:
        job.await_event("waiting")
        cluster.set("alpha:1", "beta:1", "gamma:1")
        job.check_success(size=2)
        assert hosts_of(job) == [["alpha", "beta"], ["alpha"], ["alpha", "gamma"]]


def test_upstreams_blacklisting(tmp_path: Path):
    """One failure, and a host is not used any more, if there are enough others."""
    cluster = Cluster(tmp_path, "alpha:1", "beta:2")
    plan = {"steps": 20, "size": 1, "host_faults": {"beta": ["step", 5, "SIGKILL"]}}
    options = [*cluster.options(3, 1), "--max-worker-failures", "1"]
    with Launched(tmp_path, options, plan, env=cluster.env) as job:
        job.check_success(size=1)
        assert hosts_of(job) == [["alpha", "beta", "beta"], ["alpha"]]


def test_a_lost_host(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:1", "beta:1")
    plan = {"steps": 10, "size": 1}
    options = [*cluster.options(2, 1), "--max-worker-failures", "1"]
    with Launched(tmp_path, options, plan, env=cluster.env) as job:
        job.await_event("formed")
        (pid,) = {event["pid"] for event in job.events("started") if event["host"] == "beta"}
        agent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        assert job.wait() == 0, str(job)
        assert [steps == value for steps, value, _, _ in job.ends().values()] == [True]
        job.await_nothing_left()
        assert "the connection to beta is lost" in job.errors
        assert [event["host"] for event in job.events("failed")] == ["beta"]


def test_a_host_that_cannot_be_reached(tmp_path: Path):
    cluster = Cluster(tmp_path, "alpha:2", "unknown:2")
    options = [*cluster.options(2, 2), "--max-worker-failures", "1"]
    with Launched(tmp_path, options, {}, env=cluster.env) as job:
        job.check_success(size=2)
        assert "Could not resolve hostname unknown" in job.errors


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_discovery_script_that_fails(tmp_path: Path, when: str):
    cluster = Cluster(tmp_path, "alpha:1")
    if when == "first":
        cluster.break_down()
    plan = {"until": str(tmp_path / "go on")}
    with Launched(tmp_path, cluster.options(1, 1), plan, env=cluster.env) as job:
        if when == "first":
            assert job.wait() == 1
            assert "cannot find out which hosts there are" in job.errors
            assert "No such file or directory" in job.errors
            return
        job.await_event("formed")
        cluster.break_down()
        job.await_event("discovery failed", occurrence=2)
        (tmp_path / "go on").touch()
        job.check_success(size=1)
        assert job.errors.count("going on with the known hosts") == 1
