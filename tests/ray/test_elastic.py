"""Elastic jobs on a real cluster: workers that die, nodes that come and go."""

from __future__ import annotations

import os
import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from horovod.ray import ElasticRayExecutor, RayExecutor
from horovod.ray.elastic import RayHostDiscovery, TestDiscovery
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.functions.run_function import RemoteError
from tests.files import contents
from tests.ray import training
from tests.ray.conftest import add_node, remove_node
from tests.ray.processes import await_ends

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(900)]


def elastic(**how: Any) -> RayExecutor:
    settings = RayExecutor.create_settings(timeout_s=300)
    executor = RayExecutor(settings, **how)
    executor.start()
    return executor


class Events:
    """A callback that notes all messages, and does something when the job first has a size.

    It does so in the second step there, when all ranks have committed the first: a worker that is
    killed in the first may take along that the job ever had this size.
    """

    def __init__(self, **actions: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self._actions = actions
        self._first: dict[str, int] = {}

    def __call__(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        when, step = f"at{message['size']}", message["step"]
        if step > self._first.setdefault(when, step) and when in self._actions:
            self._actions.pop(when)(message)


def kill(message: dict[str, Any]) -> None:
    os.kill(message["pid"], signal.SIGKILL)


def test_a_killed_worker_is_replaced_and_the_state_is_kept(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    door = tmp_path / "door"  # the new worker may be faster than the others agree to be two

    def kill_one(message: dict[str, Any]) -> None:
        door.touch()
        kill(message)

    events = Events(at3=kill_one, at2=lambda _: door.unlink())
    found = elastic(min_workers=2, max_workers=3).run(
        training.train_through, args=[[3, 2, 3], str(door)], callbacks=[events]
    )
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert all(one["seen"] == (3, 2, 3) for one in found)
    assert len({(one["step"], *one["weights"]) for one in found}) == 1
    pids = {message["pid"] for message in events.messages}
    assert len(pids) == 4
    await_ends(pids)
    said = capfd.readouterr().err
    assert "horovod.ray: 3 workers: the job begins" in said
    assert "failed: killed by SIGKILL" in said


def test_nodes_come_and_go(cluster: Any):
    # One node has room for one worker; a second one comes, and is lost with its worker. Ray's
    # test cluster changes in the main thread only, so the job runs in another.
    first: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    events = Events(at1=first.put, at2=first.put)
    executor = elastic(min_workers=1, cpus_per_worker=8)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(executor.run, training.train_through, [[1, 2, 1]], callbacks=[events])
        job.add_done_callback(lambda _: first.put({}))
        assert first.get()["size"] == 1, job.result()
        added = add_node(cluster, num_cpus=8)
        grown = first.get()
        remove_node(cluster, added, allow_graceful=False)
        assert grown["size"] == 2, job.result()
        assert [(one["rank"], one["seen"]) for one in job.result()] == [(0, (1, 2, 1))]
    nodes = {message["node"] for message in events.messages}
    assert len(nodes) == 2
    assert added.node_id in nodes


def test_a_host_that_is_taken_away_and_comes_back_under_a_cooldown(
    capfd: pytest.CaptureFixture[str],
):
    offered = {"left": 1, "right": 1}  # names that a node has as resources

    class Changing(HostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return dict(offered)

    events = Events(at2=lambda _: offered.pop("right"), at1=lambda _: offered.update(right=1))
    settings = RayExecutor.create_settings(timeout_s=300)
    settings.discovery = Changing()
    executor = RayExecutor(settings, min_workers=1, cooldown_range=[1, 1], override_discovery=False)
    executor.start()
    found = executor.run(training.train_through, args=[[2, 1, 2]], callbacks=[events])
    assert [(one["rank"], one["seen"]) for one in found] == [(0, (2, 1, 2)), (1, (2, 1, 2))]
    assert len({message["pid"] for message in events.messages}) == 3
    said = capfd.readouterr().err
    assert "right is not available any more" in said
    assert "failure" not in said, "a host that was taken away has not failed"


def test_all_cpus_are_taken_by_others(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("horovod.ray.node_set.SILENT_SECONDS", 0.1)
    others = placement_group([{"CPU": 8}, {"CPU": 4}, {"CPU": 4}])
    assert others.wait(300)
    try:
        with pytest.raises(RemoteError) as caught:
            elastic(min_workers=2, max_workers=2, elastic_timeout=1).run(training.place)
    finally:
        remove_placement_group(others)
    told = (
        "the job needs 2 workers, and 0 can begin. Ray has not started w0 and w1: they need 1 CPU "
        "each, and the cluster has 16 CPUs, of which 0 are free, on 3 nodes: "
    )
    assert f"gave up after 1 s (elastic_timeout): {told}" in str(caught.value)
    assert f"horovod.ray: waiting up to 1 s for room: {told}" in capfd.readouterr().err


def test_the_function_fails_everywhere():
    def fail() -> None:
        raise LookupError("as expected")

    with pytest.raises(LookupError, match="as expected") as caught:
        elastic(min_workers=2, max_workers=2).run(fail)
    assert isinstance(caught.value.__cause__, RemoteError)
    assert "in fail" in caught.value.__cause__.traceback


def test_no_change_is_allowed(monkeypatch: pytest.MonkeyPatch):
    def wait() -> None:
        from horovod.ray import ray_logger

        rank = training.join_elastic_job()
        for step in range(2):
            ray_logger.log({"rank": rank, "size": 2, "pid": os.getpid(), "step": step})
        time.sleep(1000)

    monkeypatch.setattr("horovod.ray.elastic_v2.FAILURE_GRACE", 0.1)
    events = Events(at2=kill)
    with pytest.raises(RemoteError, match=r"exceeded limit: 0 \(reset_limit\)"):
        elastic(min_workers=1, max_workers=2, reset_limit=0).run(wait, callbacks=[events])
    await_ends(message["pid"] for message in events.messages)


def test_too_few_slots():
    executor = elastic(min_workers=40, elastic_timeout=1)
    with pytest.raises(RemoteError, match=r"(?s)gave up after 1 s \(elastic_timeout\).*40 slots"):
        executor.run(training.place)


def test_what_an_elastic_job_cannot_do():
    executor = elastic(min_workers=1)
    with pytest.raises(NotImplementedError, match=r"use run\(\)"):
        executor.run_remote(training.place)
    with pytest.raises(NotImplementedError, match=r"use execute\(\)"):
        executor.execute_single(lambda _: None)
    executor.shutdown()
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        executor.run(training.place)


def test_executables_variables_and_an_end_without_complaints(ray_files: str):
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), min_workers=2, max_workers=2)
    executor.start(dict, executable_kwargs={"a": 1}, extra_env_vars={"MY": "own"})

    def show(made: object) -> tuple[int, object, str]:
        return training.join_elastic_job(), made, os.environ["MY"]

    assert executor.execute(show) == [(0, {"a": 1}, "own"), (1, {"a": 1}, "own")]
    said = b"".join(contents(ray_files).values())
    assert b"gone or out of reach" not in said, "the workers of a job that is done have no driver"


def test_a_function_that_never_joins_has_a_result():
    assert len(elastic(min_workers=1, max_workers=1).run(training.node)) == 1


def test_the_older_interface():
    with pytest.warns(DeprecationWarning, match="min_num_proc"):
        settings = ElasticRayExecutor.create_settings(min_np=2, max_num_proc=2, timeout_s=300)
    assert settings.min_num_proc == 2
    with pytest.warns(DeprecationWarning, match="RayExecutor"):
        executor = ElasticRayExecutor(settings, cpus_per_slot=2, env_vars={"MY": "own"})
    executor.start()

    def show() -> tuple[int, str]:
        return training.join_elastic_job(), os.environ["MY"]

    assert executor.run(show) == [(0, "own"), (1, "own")]


# -- which hosts there are -----------------------------------------------------------------------


def test_nodes_are_hosts_even_when_they_share_an_address():
    found = RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots()
    assert sorted(found.values()) == [2, 2, 4]
    address = ray.nodes()[0]["NodeManagerAddress"]
    assert [name for name in found if "#" not in name] == [address]


def test_names_stay_and_are_understood():
    discovery = RayHostDiscovery()
    names = list(discovery.find_available_hosts_and_slots())
    identities = [discovery.node_of(name)["NodeID"] for name in names]  # type: ignore[index]
    assert len(set(identities)) == 3
    assert list(discovery.find_available_hosts_and_slots()) == names
    for identity in identities:
        assert discovery.node_of(identity)["NodeID"] == identity  # type: ignore[index]
    assert discovery.node_of("192.0.2.77") is None


def test_gpus_count_where_they_are_asked_for():
    assert RayHostDiscovery(use_gpu=True).find_available_hosts_and_slots() == {}
    assert list(RayHostDiscovery(cpus_per_slot=5).find_available_hosts_and_slots().values()) == [1]


def test_hosts_that_seem_to_come_and_go():
    discovery = TestDiscovery(1, 2, change_frequency_s=0.0, verbose=False)
    sizes = {len(discovery.find_available_hosts_and_slots()) for _ in range(40)}
    assert sizes == {1, 2}
    first = [next(iter(discovery.find_available_hosts_and_slots())) for _ in range(20)]
    assert len(set(first)) == 1, "graceful: the first stays"


def test_hosts_from_the_settings():
    class Named(RayHostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            (other,) = [n["NodeID"] for n in ray.nodes() if n["Alive"]][-1:]
            return {other: 2}

    settings = ElasticRayExecutor.create_settings(timeout_s=300, discovery=Named())
    executor = RayExecutor(settings, min_workers=2, override_discovery=False)
    executor.start()

    def show() -> tuple[int, str]:
        return training.join_elastic_job(), training.node()

    wanted = next(iter(settings.discovery.find_available_hosts_and_slots()))
    assert executor.run(show) == [(0, wanted), (1, wanted)]
    settings.discovery = None
    with pytest.raises(ValueError, match=r"settings\.discovery is not set"):
        executor.run(training.node)
