"""Nodes with networks of their own: three machines as far as Ray and Horovod can see."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts import Hosts, available, host_address

pytestmark = pytest.mark.timeout(900)

PORT = 6399
SECONDS = 400
ATTEMPTS = 5
RAY = "from ray.scripts.scripts import main; main()"  # the program `ray`

PROGRAM = """
import json, sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
from horovod.ray import RayExecutor
from tests.ray import training
executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_hosts=3)
executor.start()
found = executor.run(training.total, args=[1.0])
addresses = sorted(node["NodeManagerAddress"] for node in ray.nodes())
executor.shutdown()
print("found", json.dumps({"found": found, "addresses": addresses}), flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts, each with a Ray node that `ray start` started."""
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-c", RAY, "start", "--num-cpus=1", "--block"]
    with ExitStack() as stack:
        found = stack.enter_context(Hosts(3))
        for host in range(3):
            where = [f"--node-ip-address={host_address(host)}"]
            if host == 0:
                where += ["--head", f"--port={PORT}", "--include-dashboard=false"]
            else:
                where += [f"--address={host_address(0)}:{PORT}"]
            for attempt in range(ATTEMPTS):
                log = tmp_path / f"node{host}.{attempt}"
                with log.open("wb") as file:
                    node = found.popen(
                        host,
                        [*command, *where],
                        stdout=file,
                        stderr=file,
                        env={**os.environ, "RAY_TMPDIR": _short(tmp_path, stack)},
                        start_new_session=True,
                    )
                if _starts(node, log):
                    stack.callback(_end, node)
                    break
                _end(node)
            else:
                pytest.fail(log.read_text())
        yield found


def _short(folder: Path, stack: ExitStack) -> str:
    """A path to the folder that is short enough for the sockets in it."""
    link = Path(f"/tmp/hvd{os.getpid()}")
    if not link.is_symlink():
        (folder / "ray").mkdir()
        link.symlink_to(folder)
        stack.callback(link.unlink)
    return str(link)


def _starts(node: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait for a node; it gives up after 30 s, whatever the machine does."""
    deadline = time.monotonic() + SECONDS
    while "Ray runtime started" not in log.read_text():
        if node.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _end(node: subprocess.Popen[bytes]) -> None:
    node.send_signal(signal.SIGTERM)  # `ray start --block` takes its processes along
    try:
        node.wait(30)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


def test_three_nodes_with_addresses_of_their_own(hosts: Hosts, tmp_path: Path):
    script = tmp_path / "driver.py"
    script.write_text(PROGRAM)
    address = f"{host_address(0)}:{PORT}"
    driver = hosts.popen(
        0,
        [sys.executable, str(script), address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = driver.communicate(timeout=SECONDS)
    lines = output.decode().splitlines()
    answers = [line for line in lines if line.startswith("found ")]
    assert answers, output.decode()
    told = json.loads(answers[0].removeprefix("found "))
    assert told["addresses"] == [host_address(host) for host in range(3)]
    assert [one["total"] for one in told["found"]] == [6.0] * 3
    assert told["found"][0]["hosts"] == [[0], [1], [2]]
    assert told["found"][0]["transport"] == "TCP"
