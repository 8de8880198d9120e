"""horovodrun across three hosts with an sshd each: what a user sees, and that nothing is left."""

from __future__ import annotations

import ast
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import LONG
from tests.faults.losing_rank import FILE, WAYS
from tests.faults.test_first_cause import check
from tests.forked_python import forked_python
from tests.hosts import host_address
from tests.multihost.ssh_hosts import INTERFACES, ROOT, SshHosts, available
from tests.runner.horovodrun import wait_for_starts

HOSTS = "host0:2,host1:1,host2:1"
HANG = 200.0
PROMISED = 5.0  # seconds within which everything ends after the launcher's death
TIMES = 3  # that a promise may be tried: a busy machine adds its own time
# The other hosts need some of that time as well, on a busy machine more.
PATIENCE = [("--start-timeout", seconds) for seconds in ("2", "20", "60")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    hosts = SshHosts(tmp_path_factory.mktemp("cluster"))
    yield hosts
    hosts.close()


def printed(stdout: str) -> dict[int, dict]:
    found = re.findall(r"^\[(\d+)\]<stdout>:(\{.*\})$", stdout, re.MULTILINE)
    return {int(rank): ast.literal_eval(text) for rank, text in found}


COLLECTIVES = """
import os, socket, torch
import horovod.torch as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
large = torch.arange(300_000, dtype=torch.float64) + rank
total = hvd.allreduce(large, op=hvd.Sum, name="large")
assert torch.equal(total, torch.arange(300_000, dtype=torch.float64) * size + 6)
gathered = hvd.allgather(torch.full((rank + 1, 2), rank), name="gather")
assert gathered[:, 0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
assert hvd.broadcast(torch.tensor([rank]), root_rank=3, name="b").item() == 3
swapped = hvd.alltoall(torch.arange(4) + 10 * rank, name="swap")
assert swapped.tolist() == [rank, 10 + rank, 20 + rank, 30 + rank]
place = [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
print({"host": socket.gethostname(), "place": place, "cwd": os.getcwd()})
hvd.shutdown()
"""


# The other ways differ in the ranks and the report, not in ssh: see test_first_cause.
@pytest.mark.parametrize("way", WAYS if LONG else WAYS[:1])
def test_the_cause_of_a_failure_is_named(cluster: SshHosts, way: str, tmp_path: Path):
    command = (*forked_python(), FILE, way, str(tmp_path))
    code, _, stderr = cluster.run(
        "-np", "3", "-H", "host0:1,host1:1,host2:1", *command, patient=True
    )
    check(code, stderr, way, late=True)


def test_collectives_are_right_on_hosts_of_different_sizes(cluster: SshHosts):
    code, stdout, stderr = cluster.run("-np", "4", "-H", HOSTS, *forked_python(), "-c", COLLECTIVES)
    assert code == 0, stdout + stderr
    cwd = str(cluster.folder)
    assert printed(stdout) == {
        0: {"host": "host0", "place": [0, 2, 0, 3], "cwd": cwd},
        1: {"host": "host0", "place": [1, 2, 0, 1], "cwd": cwd},
        2: {"host": "host1", "place": [0, 1, 1, 3], "cwd": cwd},
        3: {"host": "host2", "place": [0, 1, 2, 3], "cwd": cwd},
    }


def test_the_training_example(cluster: SshHosts):
    script = str(ROOT / "examples" / "pytorch" / "pytorch_mnist.py")
    code, stdout, stderr = cluster.run(
        *("-np", "3", "-H", "host0:2,host1:1", *forked_python(), script, "--epochs", "1")
    )
    assert code == 0, stdout + stderr
    assert re.search(r"^\[0\]<stdout>:.*accuracy", stdout, re.MULTILINE), stdout


SHOW = """
import os, socket
names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR", "HOROVOD_GLOO_IFACE", "HOROVOD_HOSTNAME")
print({"host": socket.gethostname(), **{name: os.environ.get(name) for name in names}})
"""


def test_addresses_are_those_that_lead_to_the_hosts(cluster: SshHosts):
    """The launcher's for the store; rank 0's host, which is another, for torch.distributed."""
    hosts = "host1:1,host2:1,other-name:1"
    code, stdout, stderr = cluster.run("-np", "2", "-H", hosts, sys.executable, "-c", SHOW)
    assert code == 0, stderr
    for rank, shown in printed(stdout).items():
        assert shown == {
            "host": f"host{rank + 1}",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host_address(0),
            "MASTER_ADDR": host_address(1),
            "HOROVOD_GLOO_IFACE": None,
            "HOROVOD_HOSTNAME": f"host{rank + 1}",
        }


def test_names_of_the_ssh_configuration_and_interfaces_that_differ(cluster: SshHosts):
    code, stdout, stderr = cluster.run(
        *("-np", "2", "-H", "host0:1,other-name:1"),
        *("--network-interfaces", ",".join(INTERFACES), sys.executable, "-c", SHOW),
    )
    assert code == 0, stderr
    found = printed(stdout)
    assert [found[rank]["host"] for rank in (0, 1)] == ["host0", "host1"]
    assert [found[rank]["HOROVOD_GLOO_IFACE"] for rank in (0, 1)] == INTERFACES[:2]
    assert {found[rank]["MASTER_ADDR"] for rank in (0, 1)} == {host_address(0)}


def test_an_interface_that_a_host_lacks(cluster: SshHosts):
    code, _, stderr = cluster.run(
        *("-np", "2", "-H", "host0:1,host1:1", "--network-interfaces", INTERFACES[0], "true")
    )
    assert code == 2
    assert f"host1 has no interface with an address among {INTERFACES[0]}" in stderr
    assert INTERFACES[1] in stderr


def test_a_rank_that_fails_on_another_host(cluster: SshHosts, tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '3':\n"
        f"    open({str(fifo)!r}).read()\n"
        "    raise RuntimeError('out of luck')\n"
        "signal.pause()\n"
    )
    command = (sys.executable, "-c", program)
    launcher = cluster.start("-np", "4", "-H", HOSTS, "--verbose", *command)
    try:
        wait_for_starts(launcher, 4)
        fifo.write_text("fail now")
        stderr = launcher.communicate(timeout=HANG)[1].decode()
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 1
    assert "rank 3 on host2 failed: exit code 1; stopping the other 3" in stderr
    assert re.search(r"^  3     host2  \d+ +exit code 1$", stderr, re.MULTILINE), stderr
    assert "  RuntimeError: out of luck\n" in stderr


def test_hosts_that_cannot_be_logged_in_to(cluster: SshHosts):
    code, _, stderr = cluster.run(
        *("-np", "3", "-H", f"host1:1,no-such-host:1,{host_address(1)}:1", "-p", "2222", "true"),
        patient=True,
    )
    assert code == 1
    assert "cannot start on no-such-host: ssh: Could not resolve hostname no-such-host" in stderr
    assert f"ssh: connect to host {host_address(1)} port 2222: Connection refused" in stderr


def test_a_host_that_is_switched_off(cluster: SshHosts):
    cluster.hosts.cut(2)
    try:
        for seconds in PATIENCE:
            code, _, stderr = cluster.run("-np", "4", "-H", HOSTS, *seconds, "true", patient=True)
            if "host1" not in stderr:
                break
    finally:
        cluster.hosts.heal(2)
    assert code == 1
    assert re.search(r"cannot start on host2: ssh: connect to host host2 port 22: \w+", stderr)
    assert "host1" not in stderr


def test_the_wrong_key(cluster: SshHosts):
    code, _, stderr = cluster.run(
        *("-np", "2", "-H", "host0:1,host1:1", "-i", str(cluster.folder / "id_bad"), "true"),
        config=f"IdentitiesOnly yes\nUserKnownHostsFile {cluster.folder}/known_hosts\n",
    )
    assert code == 1
    assert "cannot start on host1: " in stderr
    assert "root@host1: Permission denied (publickey" in stderr


def test_a_host_whose_key_is_not_known(cluster: SshHosts):
    """Host keys are checked as the user's configuration says: not silently accepted."""
    code, _, stderr = cluster.run(
        *("-np", "2", "-H", "host0:1,host1:1", "true"),
        config=f"IdentityFile {cluster.folder}/id_good\nUserKnownHostsFile /dev/null\n",
    )
    assert code == 1
    assert "cannot start on host1: " in stderr
    assert "Host key verification failed" in stderr
    assert "log in once by hand" in stderr


def test_a_firewall_between_a_host_and_the_launcher(cluster: SshHosts):
    """ssh gets through, but what host2 opens towards the launcher is dropped without a word."""
    rules = [
        "rule {} pref 10 ipproto tcp dport 22 lookup main",
        f"rule {{}} pref 20 ipproto tcp to {host_address(2)} blackhole",
    ]
    cluster.hosts.ip(0, *(rule.format("add") for rule in rules))
    try:
        for seconds in PATIENCE:
            code, _, stderr = cluster.run("-np", "4", "-H", HOSTS, *seconds, "true")
            if "host2 cannot connect" in stderr:
                break
    finally:
        cluster.hosts.ip(0, *(rule.format("del") for rule in rules))
    assert code == 1
    tried = rf"host2 cannot connect to this machine.* tried {re.escape(host_address(0))}:\d+ \("
    assert re.search(tried, stderr), stderr
    assert "firewall" in stderr
    assert "--network-interfaces" in stderr


class Running:
    """A job whose ranks have announced themselves, and what is left of it."""

    def __init__(self, cluster: SshHosts, program: str) -> None:
        self.launcher = cluster.start("-np", "4", "-H", HOSTS, sys.executable, "-c", program)
        assert self.launcher.stdout is not None
        self.ranks: dict[int, int] = {}
        while len(self.ranks) < 4:
            line = self.launcher.stdout.readline().decode()
            assert line, self.launcher.communicate()[1].decode()
            rank, _, pid = line.removeprefix("[").partition("]<stdout>:pid ")
            self.ranks[int(rank)] = os.pidfd_open(int(pid))

    def end(self) -> float:
        """Seconds until no rank is left."""
        begin = time.monotonic()
        for rank, fd in self.ranks.items():
            assert select.select([fd], [], [], HANG)[0], f"rank {rank} is left"
        return time.monotonic() - begin

    def finish(self) -> tuple[int, str]:
        _, stderr = self.launcher.communicate(timeout=HANG)
        return self.launcher.returncode, stderr.decode()

    def close(self) -> None:
        for fd in self.ranks.values():
            if not select.select([fd], [], [], 0)[0]:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self.launcher.kill()
        self.launcher.communicate()


SIT = "import os, signal; {}print('pid', os.getpid())\nwhile True: signal.pause()"
STUBBORN = SIT.format("signal.signal(signal.SIGTERM, signal.SIG_IGN); ")


@pytest.fixture
def running(cluster: SshHosts) -> Iterator[Running]:
    job = Running(cluster, SIT.format(""))
    yield job
    job.close()


def test_a_killed_launcher_takes_along_all_hosts(cluster: SshHosts):
    took = []
    while len(took) < TIMES and (not took or took[-1] >= PROMISED):
        running = Running(cluster, STUBBORN)
        try:
            running.launcher.kill()
            took.append(running.end())
        finally:
            running.close()
    assert took[-1] < PROMISED, took


def test_ctrl_c_reaches_all_hosts(running: Running):
    running.launcher.send_signal(signal.SIGINT)
    code, stderr = running.finish()
    assert code == 130
    assert "got SIGINT: asked the workers to end" in stderr
    running.end()


def test_ctrl_c_twice_does_not_wait_for_a_host_that_is_cut_off(cluster: SshHosts, running: Running):
    cluster.hosts.cut(2)
    try:
        running.launcher.send_signal(signal.SIGINT)
        assert running.launcher.stderr is not None
        while b"once more kills" not in running.launcher.stderr.readline():
            assert running.launcher.poll() is None
        running.launcher.send_signal(signal.SIGINT)
        assert running.finish()[0] == 130
    finally:
        cluster.hosts.heal(2)


def test_a_connection_that_breaks_is_named_and_ends_everything(running: Running):
    with open(f"/proc/{running.launcher.pid}/task/{running.launcher.pid}/children") as file:
        children = [int(pid) for pid in file.read().split()]
    found = []
    for pid in children:
        with open(f"/proc/{pid}/cmdline") as file:
            words = file.read().split("\0")
        if words[0].endswith("ssh") and "host2" in words:
            found.append(pid)
    (ssh,) = found
    os.kill(ssh, signal.SIGKILL)
    code, stderr = running.finish()
    assert code == 1
    assert re.search(
        r"^  3     host2  -    lost: ssh ended with exit code -9$", stderr, re.MULTILINE
    )
    running.end()


PLAIN_TORCH = """
import os, torch.distributed as dist, torch
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
print({"total": total.tolist(), "rank": dist.get_rank()})
dist.barrier()
dist.destroy_process_group()
"""


def test_a_plain_torch_script_meets_on_the_host_of_rank_0(cluster: SshHosts):
    code, stdout, stderr = cluster.run(
        *("-np", "2", "-H", "host1:1,host2:1", *forked_python(), "-c", PLAIN_TORCH)
    )
    assert code == 0, stderr
    assert printed(stdout) == {rank: {"total": [2.0] * 3, "rank": rank} for rank in range(2)}
