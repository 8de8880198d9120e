"""What people are told when something is wrong, and what is left behind then."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from horovod.ray import RayExecutor
from horovod.ray.runner import Coordinator, ElasticParams, StaticParams
from horovod.ray.utils import detect_nics, nics_to_env_var
from horovod.ray.worker import BaseHorovodWorker
from tests.ray import training
from tests.ray.conftest import add_node, remove_node
from tests.ray.processes import await_ends

pytestmark = pytest.mark.timeout(900)

SECONDS = 300.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_workers": 2, "num_hosts": 2}, "num_workers=2, num_hosts=2"),
        ({}, "say how many workers"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
        ({"num_hosts": 1, "num_workers_per_host": 0}, "num_workers_per_host must be at least 1"),
        ({"max_workers": 2}, "max_workers is for elastic jobs"),
        ({"max_workers": 2, "min_workers": 0}, "max_workers is for elastic jobs"),
        ({"min_workers": 1, "num_workers": 2}, "Both `min_workers` and `num_workers` provided"),
        ({"min_workers": 1, "num_hosts": 2}, "Both `min_workers` and `num_hosts` provided"),
        ({"min_workers": 3, "max_workers": 2}, "less than min_workers=3"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "use_gpu is not set"),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0}, "at least 1, not 0"),
        ({"min_workers": 1, "cooldown_range": (5, 1)}, "cooldown_range must be"),
        ({"min_workers": 1, "reset_limit": -1}, "reset_limit must not be negative"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        RayExecutor(RayExecutor.create_settings(), **arguments)


def test_settings_as_ever():
    settings = RayExecutor.create_settings(nics={"eth0"}, ssh_str="x", ssh_identity_file="y")
    assert (settings.timeout_s, settings.placement_group_timeout_s) == (30, 100)
    assert settings.start_timeout == 30
    assert (settings.verbose, settings.elastic, settings.nics) == (1, False, {"eth0"})
    assert StaticParams(num_workers=1, use_gpu=True).gpus == 1
    assert ElasticParams().min_workers == 1


def test_without_a_cluster():
    program = (
        "from horovod.ray import RayExecutor\n"
        "RayExecutor(RayExecutor.create_settings(), num_workers=1).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert "RuntimeError: this process is not connected to a Ray cluster: call ray.init()" in (
        done.stderr
    )


@pytest.mark.usefixtures("cluster")
def test_more_workers_than_there_is_room_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("horovod.ray.strategy.SILENT_SECONDS", 0.1)
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=40, cpus_per_worker=2)
    with pytest.raises(TimeoutError) as caught:
        executor.start()
    said = str(caught.value)
    assert "gave up after 1 s (placement_group_timeout_s)" in said
    assert "room in the Ray cluster for 40 workers with 2 CPU each" in said
    assert re.search(r"The cluster has 16 CPUs, of which \d+ (is|are) free, on 3 nodes: ", said)
    assert "has 8 CPU (" in said
    told = capfd.readouterr().err
    assert "horovod.ray: waiting up to 1 s for room in the Ray cluster for 40 workers" in told
    assert "The cluster has 16 CPUs" in told
    with pytest.raises(TimeoutError, match="5 nodes with 1 workers each"):
        RayExecutor(settings, num_hosts=5).start()


@pytest.mark.usefixtures("cluster")
def test_other_versions_are_named(cluster: Any, tmp_path: Path):
    told = tmp_path / "torch-2.4.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    other = add_node(cluster, num_cpus=1, env_vars={"PYTHONPATH": path})
    try:
        with pytest.raises(
            RuntimeError, match=r"has torch \S+, but node .* has \S+: install the same"
        ):
            RayExecutor(RayExecutor.create_settings(timeout_s=300), num_hosts=4).start()
    finally:
        remove_node(cluster, other)


DRIVER = """
import os, sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
from horovod.ray import RayExecutor
from tests.ray import training
settings = RayExecutor.create_settings(timeout_s=300)
how = dict(min_workers=2, max_workers=2) if sys.argv[2] == "elastic" else dict(num_workers=2)
executor = RayExecutor(settings, **how)
executor.start()

def wait():
    from horovod.ray import ray_logger
    ray_logger.log(os.getpid())
    if "HOROVOD_WORKER_ID" in os.environ:
        training.join_elastic_job()
    time.sleep(1000)

executor.run(wait, callbacks=[lambda pid: print("pid", pid, flush=True)])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_a_driver_that_is_ended_leaves_nothing_running(
    cluster: Any, kind: str, number: signal.Signals, tmp_path: Path
):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(script), cluster.address, kind],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as driver,
    ):
        assert driver.stdout is not None
        pids = []
        while len(pids) < 2:
            line = driver.stdout.readline()
            assert line, (tmp_path / "errors").read_text()
            pids += map(int, re.findall(r"^pid (\d+)", line))
        driver.send_signal(number)
        driver.wait(SECONDS)
    await_ends(pids)
    said = (tmp_path / "errors").read_text()
    if number != signal.SIGKILL:
        assert "horovod.ray: the job was interrupted, and its workers were ended" in said
        assert "***" not in said, "no stack of Ray's C++ part"
        assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


# -- who is which rank ---------------------------------------------------------------------------


def test_the_coordinator_goes_by_node_id():
    coordinator = Coordinator(RayExecutor.create_settings())
    for rank, node in enumerate(["a", "a", "a", "b", "b", "c"]):
        coordinator.register("host", node, rank)
    with pytest.raises(ValueError, match="rank 3 is registered twice"):
        coordinator.register("host", "c", 3)
    assert coordinator.world_size == 6
    assert coordinator.node_id_string == "a:3,b:2,c:1"
    assert coordinator.hoststring == "host:3,host:2,host:1"
    env = coordinator.finalize_registration()
    local = [int(env[rank]["HOROVOD_LOCAL_RANK"]) for rank in range(6)]
    cross = [(env[r]["HOROVOD_CROSS_RANK"], env[r]["HOROVOD_CROSS_SIZE"]) for r in range(6)]
    assert local == [0, 1, 2, 0, 1, 0]
    assert cross == [("0", "3"), ("0", "2"), ("0", "1"), ("1", "3"), ("1", "2"), ("2", "3")]
    where = coordinator.establish_rendezvous()
    assert where["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    coordinator.close()


@pytest.mark.usefixtures("cluster")
def test_interfaces():
    settings = RayExecutor.create_settings(nics=["eth1", "eth0"])
    assert detect_nics(settings) == ["eth0", "eth1"]
    assert nics_to_env_var(["eth0"])["HOROVOD_GLOO_IFACE"] == "eth0"
    worker = ray.remote(BaseHorovodWorker).options(num_cpus=0).remote()
    (found,) = detect_nics(RayExecutor.create_settings(), node_workers=[worker, worker])
    ray.kill(worker)
    named = RayExecutor(RayExecutor.create_settings(timeout_s=300, nics=[found]), num_workers=1)
    named.start()
    assert named.run(lambda: os.environ["HOROVOD_GLOO_IFACE"]) == [found]
    named.shutdown()
    wrong = RayExecutor(RayExecutor.create_settings(timeout_s=300, nics=["none0"]), num_workers=1)
    with pytest.raises(RuntimeError, match="has no interface with an address among none0"):
        wrong.start()


@pytest.mark.usefixtures("cluster")
def test_a_function_that_cannot_be_called():
    executor = RayExecutor(RayExecutor.create_settings(), min_workers=1)
    executor.start()
    with pytest.raises(ValueError, match="a function is needed"):
        executor.run(3)  # type: ignore[arg-type]
    assert callable(training.place)
