"""Jobs with a fixed set of workers, on a real cluster of three nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.common.wire import encode_key
from horovod.ray import BaseHorovodWorker, RayExecutor
from horovod.ray.strategy import create_placement_group
from horovod.runner.functions.run_function import RemoteError
from tests.files import contents
from tests.ray import training
from tests.ray.processes import await_ends, await_true

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(900)]

SECONDS = 300.0


def settings(**how: Any) -> Any:
    return RayExecutor.create_settings(**{"timeout_s": 300, **how})


def live_groups() -> set[str]:
    return {name for name, one in placement_group_table().items() if one["state"] != "REMOVED"}


class Counter:
    """An executable."""

    def __init__(self, start: int, step: int = 1) -> None:
        self.value = start
        self.step = step

    def add(self) -> int:
        self.value += self.step
        return self.value


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayExecutor]:
    """Two workers on each of two nodes."""
    executor = RayExecutor(settings(), num_hosts=2, num_workers_per_host=2)
    executor.start(
        Counter, executable_args=[10], executable_kwargs={"step": 5}, extra_env_vars={"MY": "own"}
    )
    yield executor
    executor.shutdown()


def test_ranks_of_a_node_share_memory_and_nodes_are_told_apart(hosts: RayExecutor):
    found = hosts.run(training.total, args=[2.0])
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    assert [one["local_rank"] for one in found] == [0, 1, 0, 1]
    assert [one["cross_rank"] for one in found] == [0, 0, 1, 1]
    assert {one["total"] for one in found} == {20.0}
    assert found[0]["hosts"] == [[0, 1], [2, 3]], "by node id: all nodes have one host name"
    assert found[0]["transport"] == "HIERARCHICAL", "shared memory inside nodes, TCP between"
    nodes = [one["node"] for one in hosts.run(training.place)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_a_second_function_starts_anew(hosts: RayExecutor):
    assert [one["total"] for one in hosts.run(training.total, kwargs={"value": 1.0})] == [10.0] * 4


def test_references_come_at_once(hosts: RayExecutor):
    refs = hosts.run_remote(training.total, [1.0])
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert [one["rank"] for one in ray.get(refs)] == [0, 1, 2, 3]


def test_executables_keep_their_state(hosts: RayExecutor):
    assert hosts.execute(lambda counter: counter.add()) == [15] * 4
    assert hosts.execute_single(lambda counter: counter.add()) == 20
    assert hosts.execute(lambda counter: counter.value) == [20, 15, 15, 15]


def test_variables_for_all_workers(hosts: RayExecutor):
    assert hosts.run(lambda: os.environ["MY"]) == ["own"] * 4


def test_what_workers_log_reaches_callbacks(hosts: RayExecutor):
    def report(count: int) -> None:
        from horovod.ray import ray_logger

        for step in range(count):
            ray_logger.log({"rank": int(os.environ["HOROVOD_RANK"]), "step": step})

    told: list[dict[str, int]] = []
    hosts.run(report, args=[3], callbacks=[told.append])
    assert len(told) == 12
    assert [one["step"] for one in told if one["rank"] == 2] == [0, 1, 2]
    hosts.run(report, args=[1])
    assert len(told) == 12, "a run without callbacks leaves nothing to later ones"


def test_what_a_callback_raises_is_raised(hosts: RayExecutor):
    def report() -> None:
        from horovod.ray import ray_logger

        ray_logger.log({})

    def refuse(message: object) -> None:
        raise KeyError("the callback")

    with pytest.raises(KeyError, match="the callback"):
        hosts.run(report, callbacks=[refuse])
    with pytest.raises(ValueError, match="callable"):
        hosts.run(report, callbacks=[3])  # type: ignore[list-item]


def test_an_exception_comes_back_with_rank_and_traceback_and_wakes_the_others(
    hosts: RayExecutor, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        import torch

        import horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise LookupError("nothing there")
        hvd.allreduce(torch.ones(2))

    # Who does not end in time is ended, and could not go on.
    monkeypatch.setattr("horovod.ray.static._GRACE", SECONDS)
    with pytest.raises(LookupError, match="nothing there") as caught:
        hosts.run(fail)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.rank == 1
    assert "in fail" in cause.traceback
    assert "rank 1" in "".join(caught.value.__notes__)
    assert hosts.run(training.total, args=[1.0])[0]["total"] == 10.0, "and all can go on"


def test_the_key_is_in_no_command_line_and_no_log(hosts: RayExecutor, ray_files: str):
    key = hosts.settings.key
    forms = {key.hex().encode(), encode_key(key).encode(), key}
    assert key.hex() not in repr(hosts.settings)
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline()).encode(errors="surrogateescape")
        except psutil.Error:
            continue
        assert not any(form in words for form in forms)
    logs = contents(ray_files)
    assert len(logs) > 10
    for path, content in logs.items():
        assert not any(form in content for form in forms), path
    assert (
        hosts.execute_single(lambda _: BaseHorovodWorker().env_vars())
        .keys()
        .isdisjoint({"_HOROVOD_SECRET_KEY"})
    )


# -- without torch, which takes its time ---------------------------------------------------------


def test_a_number_of_workers_and_nothing_left_after_shutdown():
    before = live_groups()
    with_it = RayExecutor(settings(), num_workers=6, cpus_per_worker=2)
    with_it.start()
    found = with_it.run(training.place)
    assert [one["rank"] for one in found] == list(range(6))
    assert {one["size"] for one in found} == {6}
    nodes = [one["node"] for one in found]
    assert nodes == sorted(nodes, key=nodes.index), "the ranks of a node are neighbours"
    assert [one["host"] for one in found] == nodes
    for one in found:
        mine = [other for other in found if other["node"] == one["node"]]
        assert one["local_size"] == len(mine)
        assert one["local_rank"] == mine.index(one)
    made = live_groups() - before
    assert len(made) == 1
    with_it.shutdown()
    with_it.shutdown()
    await_true(lambda: live_groups().isdisjoint(made))
    await_ends(one["pid"] for one in found)
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        with_it.run(training.place)
    with_it.start()
    assert len(with_it.run(os.getpid)) == 6, "and it can be started again"
    with pytest.raises(RuntimeError, match="has been started"):
        with_it.start()
    with_it.shutdown()


def test_inside_a_placement_group_of_the_users():
    group, bundles = create_placement_group({"CPU": 1}, 3, 300, "STRICT_PACK")
    assert bundles == [{"CPU": 1}] * 3
    node = placement_group_table(group)["bundles_to_node_id"][0]

    class Trainer:
        def train(self) -> list[dict[str, Any]]:
            executor = RayExecutor(settings(), num_workers=3, num_workers_per_host=None)
            executor.start()
            assert executor.adapter.strategy._created_placement_group is None
            found = executor.run(training.place)
            executor.shutdown()
            return found

    before = live_groups()
    where = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    trainer = ray.remote(Trainer).options(num_cpus=0, scheduling_strategy=where).remote()
    found = ray.get(trainer.train.remote(), timeout=SECONDS)
    assert [one["local_rank"] for one in found] == [0, 1, 2]
    assert {one["node"] for one in found} == {node}, "where the group is"
    assert live_groups() == before, "it made none, and the user's is still there"
    ray.kill(trainer)
    remove_placement_group(group)


def test_no_room_for_the_bundles_of_a_group():
    with pytest.raises(TimeoutError, match=r"within 1 s for 99 bundles with 1 CPU each\. The"):
        create_placement_group({"CPU": 1}, 99, 1, "PACK")


@pytest.fixture
def two() -> Iterator[RayExecutor]:
    executor = RayExecutor(settings(), num_workers=2)
    executor.start()
    yield executor
    executor.shutdown()


def test_a_rank_that_does_not_end_by_itself_is_ended(
    two: RayExecutor, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError("the reason")
        time.sleep(1000)

    pids = two.run(os.getpid)
    monkeypatch.setattr("horovod.ray.static._GRACE", 0.1)
    with pytest.raises(ValueError, match="the reason"):
        two.run(fail)
    await_ends(pids[:1])
    with pytest.raises(RuntimeError, match=r"rank 0 were ended; call shutdown\(\) and start\(\)"):
        two.run(os.getpid)


def test_a_killed_worker_is_named(two: RayExecutor):
    def fail() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    pids = two.run(os.getpid)
    with pytest.raises(RemoteError, match=rf"rank 1 on .*pid {pids[1]}\) died") as caught:
        two.run(fail)
    assert caught.value.rank == 1


def test_exit_in_a_function_is_an_error(two: RayExecutor):
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\).* rank [01] on "):
        two.run(leave)


def test_a_worker_of_ones_own():
    worker = ray.remote(BaseHorovodWorker).options(num_cpus=1).remote(world_rank=3, world_size=7)
    worker.update_env_vars.remote({"MY": "x", "NOT": None})
    env = ray.get(worker.env_vars.remote())
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env["MY"]) == ("3", "7", "x")
    assert "NOT" not in env
    assert ray.get(worker.node_id.remote()) in {node["NodeID"] for node in ray.nodes()}
    assert ray.get(worker.hostname.remote()) == os.uname().nodename
    assert ray.get(worker.get_gpu_ids.remote()) == []
    ray.get(worker.start_executable.remote(Counter, [1]))
    assert ray.get(worker.execute.remote(lambda counter: counter.add())) == 2

    class Told:
        def put(self, item: object) -> None:
            os.environ["TOLD"] = str(item)

    def report(_: object) -> str:
        from horovod.ray import ray_logger

        ray_logger.log({"a": 1})
        return os.environ["TOLD"]

    worker.set_queue.remote(Told())
    assert ray.get(worker.execute.remote(report)) == "{'a': 1}"
    ray.kill(worker)
