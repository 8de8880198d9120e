"""``horovod.run``, and mpirun as ``--mpi`` calls it, across hosts that are reached by ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multihost.ssh_hosts import ROOT, SshHosts, available
from tests.ranks import clean_environment

LONG = 280
BIN = Path(sys.executable).parent

SCRIPT = """
import os, socket, sys
import horovod

def where(first):
    from horovod.common.environments import detect
    return first + socket.gethostname(), detect().claim()

def fail():
    if socket.gethostname() == "host1":
        raise LookupError("not here")

def main():
    how = {"num_proc": 3, "hosts": "host0:1,host1:1,host2:1", "use_mpi": "mpi" in sys.argv}
    print("found", horovod.run(where, ("on ",), **how))
    try:
        horovod.run(fail, **how)
    except LookupError as error:
        print("raised", str(error).splitlines()[0], "on", error.__cause__.rank)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    hosts = SshHosts(tmp_path_factory.mktemp("cluster"))
    yield hosts
    hosts.close()


@pytest.mark.parametrize("way", ["gloo", "mpi"])
def test_results_and_failures_of_other_hosts(cluster: SshHosts, way: str):
    if way == "mpi" and shutil.which("mpirun", path=str(BIN)) is None:
        pytest.skip("there is no mpirun in this environment")
    script = cluster.folder / "call.py"
    script.write_text(SCRIPT)
    inside = ["sh", "-c", 'mount --bind "$0" /etc/ssh/ssh_config && exec "$@"']
    own = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HOME": str(cluster.folder),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    process = cluster.hosts.popen(
        0,
        [*inside, str(cluster.folder / "ssh_config"), sys.executable, str(script), way],
        env=clean_environment() | own,
        cwd=cluster.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = process.communicate(timeout=LONG)
    finally:
        process.kill()
        process.wait()
    lines = output.decode().splitlines()
    places = [(f"on host{rank}", (rank, 3)) for rank in range(3)]
    assert f"found {places}" in lines, output.decode() + errors.decode()
    assert "raised not here on 1" in lines, output.decode() + errors.decode()
