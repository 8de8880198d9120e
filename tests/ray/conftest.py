"""A Ray cluster of three nodes on this machine, where Ray is installed; else nothing is collected.

The nodes' CPUs are numbers that Ray counts with, and have nothing to do with the machine's. All of
Ray's files are in a temporary directory. Ray's own programs are forked (`forked_python`), as are
workers (`forked_worker`) and most programs that connect; `test_addresses` has nodes that Ray starts
with all their programs as it does for users.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from tests.forked_python import forked_python
from tests.rank_process import PRELOAD
from tests.ray import forked_worker

HAS_RAY = importlib.util.find_spec("ray") is not None

collect_ignore_glob = [] if HAS_RAY else ["test_*.py"]

ROOT = Path(__file__).resolve().parents[2]
_ATTEMPTS = 5
_SECONDS = 300  # for what only a machine that is very busy takes so long for
_NODE_SECONDS = 120  # for a node, before another one is tried

# Before Ray is imported, and for everything that Ray starts.
os.environ.update(
    {
        "RAY_gcs_server_port_wait_time_s": f"{_SECONDS}",
        "RAY_agent_register_timeout_ms": f"{_SECONDS}000",
        "RAY_worker_register_timeout_seconds": f"{_SECONDS}",
        # A node that does not answer has 50 s; one whose socket is gone is lost after five looks.
        "RAY_health_check_initial_delay_ms": "300",
        "RAY_health_check_period_ms": "300",
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": f"{_SECONDS}",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{_SECONDS}",
        # Else ray.init() waits for workers with the GIL held, and nobody serves `forked_python`.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",  # else 15: beside anything that is busy they stand still
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        # Else what Ray's server for clients forks now and then dies in a thread that gRPC starts in
        # the child, and the client waits for minutes.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
)


@pytest.fixture(scope="session")
def ray_files() -> Iterator[str]:
    """The directory of Ray's files; its name is short because sockets lie in it."""
    folder = tempfile.mkdtemp(prefix="hvd", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    os.mkdir(f"{folder}/ray")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


# Before the fork server starts: what Ray, Ray Train and the examples import.
PRELOAD += ["horovod.runner.api", "google.protobuf.reflection", "jsonschema", "requests", "yaml"]
PRELOAD += ["pyarrow.parquet", "pandas", "fsspec", "pydantic", "rich.layout", "sklearn.datasets"]
PRELOAD += ["tests.ray.preloaded_ray", "horovod.ray.train"] if HAS_RAY else []


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Make Ray wait for a node that it has started.

    It would give it 30 s, whatever the machine does, and ask all the time.
    """

    def wait_for_node(*args: Any) -> Any:
        deadline = time.monotonic() + _NODE_SECONDS
        while True:
            try:
                return get_node(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)  # between looks

    return wait_for_node


def add_node(cluster: Any, **how: Any) -> Any:
    """Add a node, and again if it did not come."""
    import ray._private.services as services

    how = {"setup_worker_path": forked_worker.__file__, **how}
    me = psutil.Process()
    for attempt in range(_ATTEMPTS):
        head, workers, others = cluster.head_node, set(cluster.worker_nodes), set(me.children())
        try:
            with (
                mock.patch.object(services, "get_node", _patient(services.get_node)),
                mock.patch.object(sys, "executable", forked_python()[0]),
            ):
                added = cluster.add_node(**how)
            break
        except Exception:
            # It would be there after all one day, as a node too many, and has the client's port.
            cluster.head_node, cluster.worker_nodes = head, workers
            for process in set(me.children()) - others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    process.wait()
            if attempt == _ATTEMPTS - 1:
                raise
    cluster.wait_for_nodes(_SECONDS)
    return added


def remove_node(cluster: Any, node: Any, **how: Any) -> None:
    """Remove a node; Ray takes its time to notice, and would give it to the next test."""
    cluster.remove_node(node, **how)
    cluster.wait_for_nodes(_SECONDS)


def _port() -> int:
    """A free port which the kernel gives to nobody who asks for any, nor Ray to its workers."""
    while True:
        with socket.socket() as candidate:
            try:
                candidate.bind(("", random.SystemRandom().randrange(20_000, 30_000)))
            except OSError:
                continue
            return int(candidate.getsockname()[1])


@pytest.fixture(scope="session")
def cluster(ray_files: str) -> Iterator[Any]:
    """Three nodes with 8, 4 and 4 CPUs; this process is connected to them."""
    import ray
    from ray.cluster_utils import Cluster

    port = _port()
    head = {"num_cpus": 8, "include_dashboard": False, "ray_client_server_port": port}
    head["resources"] = {"node:left": 1, "node:right": 1}  # it can stand for two hosts
    found = Cluster()
    add_node(found, **head)
    found.client_port = port
    for _ in range(2):
        add_node(found, num_cpus=4)
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()
