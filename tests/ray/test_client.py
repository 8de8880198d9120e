"""Through Ray Client: from a process that is not a part of the cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ray.conftest import ROOT

pytestmark = pytest.mark.timeout(900)

# Ray forks this server from a process with many gRPC threads. Now and then the child dies before it
# is one (Ray 2.60), and ray.init() raises before anything of ours has begun. It also gives up after
# half a minute if the cluster's server for clients, which nobody waits for, does not listen yet.
_CONNECTED = "connected"
_ATTEMPTS = 5

PROGRAM = """
import os, sys
import ray
ray.init(sys.argv[1])
print("connected", flush=True)
from horovod.ray import RayExecutor, ray_logger
from tests.ray import training

assert ray.util.client.ray.is_connected()
settings = RayExecutor.create_settings(timeout_s=300)
executor = RayExecutor(settings, num_workers=2)
executor.start(dict, executable_kwargs={"a": 1}, extra_env_vars={"MY": "own"})
assert executor.run(lambda: os.environ["MY"]) == ["own"] * 2
assert executor.execute(lambda made: made["a"]) == [1, 1]
assert executor.execute_single(lambda made: made) == {"a": 1}
places = ray.get(executor.run_remote(training.place))
assert [place["rank"] for place in places] == [0, 1]
assert os.getpid() not in [place["pid"] for place in places]

told = []
executor.run(lambda: ray_logger.log({"here": os.environ["HOROVOD_RANK"]}), callbacks=[told.append])
assert sorted(one["here"] for one in told) == ["0", "1"], told

def fail():
    raise LookupError("nothing there")

try:
    executor.run(fail)
except LookupError as error:
    assert "nothing there" in str(error)
else:
    raise AssertionError("it should have failed")
executor.shutdown()

elastic = RayExecutor(settings, min_workers=2, max_workers=2)
elastic.start()
told.clear()

def train():
    ray_logger.log(training.join_elastic_job())

assert elastic.run(train, callbacks=[told.append]) == [None, None]
assert sorted(told) == [0, 1]
elastic.shutdown()
print("all of it")
"""


def test_everything_through_ray_client(cluster: Any, tmp_path: Path):
    script = tmp_path / "client.py"
    script.write_text(PROGRAM)
    for _ in range(_ATTEMPTS):
        done = subprocess.run(
            [sys.executable, str(script), f"ray://127.0.0.1:{cluster.client_port}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=800,
        )
        if _CONNECTED in done.stdout:
            break
    assert done.stdout.strip().endswith("all of it"), done.stdout + done.stderr
