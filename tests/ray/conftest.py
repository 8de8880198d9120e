"""A Ray cluster of three nodes on this machine, where Ray is installed; else nothing is collected.

The nodes' CPUs are numbers that Ray counts with, and have nothing to do with the machine's. All of
Ray's files are in a temporary directory.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HAS_RAY = importlib.util.find_spec("ray") is not None

collect_ignore_glob = [] if HAS_RAY else ["test_*.py"]

ROOT = Path(__file__).resolve().parents[2]
_ATTEMPTS = 5

# Before Ray is imported, and for everything that Ray starts.
os.environ.update(
    {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
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


def add_node(cluster: Any, **how: Any) -> Any:
    """Add a node, and again if it was too slow for Ray: it has 30 s, whatever the machine does."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return cluster.add_node(**how)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return cluster.add_node(**how)


@pytest.fixture(scope="session")
def cluster(ray_files: str) -> Iterator[Any]:
    """Three nodes with 8, 4 and 4 CPUs; this process is connected to them."""
    import ray
    from ray.cluster_utils import Cluster

    from horovod.runner.agents.probe import free_port

    port = free_port("127.0.0.1")
    head = {"num_cpus": 8, "include_dashboard": False, "ray_client_server_port": port}
    found = Cluster()
    add_node(found, **head)
    found.client_port = port
    for _ in range(2):
        add_node(found, num_cpus=4)
    found.wait_for_nodes()
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()
