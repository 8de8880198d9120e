"""horovodrun --check on three hosts with an sshd each, first as they should be, then broken."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import host_address
from tests.multihost.ssh_hosts import ROOT, SshHosts, available

HANG = 200.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    reason = available() or (None if shutil.which("nsenter") else "there is no nsenter here")
    if reason is not None:
        pytest.skip(reason)
    hosts = SshHosts(tmp_path_factory.mktemp("cluster"))
    yield hosts
    hosts.close()


def check(cluster: SshHosts, hosts: str, cwd: Path, modules: Path) -> tuple[int, list[str], str]:
    """The exit status, the rows of the table, and the findings in one line."""
    options = ["--check", "-H", hosts, "--start-timeout", "60"]  # however busy this machine is
    process = cluster.start(*options, env={"PYTHONPATH": f"{modules}:{ROOT}"}, cwd=cwd)
    stdout, _ = process.communicate(timeout=HANG)
    table, _, findings = stdout.decode().partition("\n\n")
    return process.returncode, table.splitlines(), " ".join(findings.split())


def test_hosts_as_they_should_be_and_broken_ones(cluster: SshHosts):
    shared, modules, others = (cluster.folder / name for name in ("shared", "modules", "others"))
    work = shared / "work"
    for folder in (work, modules / "torch", others / "torch", others / "horovod"):
        folder.mkdir(parents=True)
    for folder, version in ((modules, "2.9.1"), (others, "2.8.0")):
        (folder / "torch" / "__init__.py").write_text("raise SystemExit('nobody imports it')")
        (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    (others / "horovod" / "__init__.py").write_text("__version__ = '0.28.1'")
    status, table, findings = check(cluster, "host0:2,host1,host2", work, modules)
    assert status == 0, findings
    assert findings.endswith("A job can run on these 3 hosts."), findings
    assert re.match(r"host +reached +Python +torch +Horovod", table[0])
    assert [row.split()[0] for row in table[1:]] == ["host0", "host1", "host2"]
    for number, row in enumerate(table[1:]):
        way = "ssh" if number else "this machine"
        assert re.search(rf"{way} +\d+\.\d+\.\S+ +2\.9\.1 +0\.\d+\.\d+", row)
        assert re.search(r"GiB +(same|[+-]\d+ ms) ", row)
        interface = cluster.hosts.interfaces[number]
        assert re.search(rf" {interface} {host_address(number)} +both ways +[\d.]+ ms, ", row)
        assert row.endswith(" same")

    cluster.mount(1, "--bind", str(others), str(modules))
    cluster.mount(2, "-t", "tmpfs", "none", str(shared))
    for host, other in ((1, 2), (2, 1)):
        cluster.hosts.ip(host, f"route add prohibit {host_address(other)}/32")
    try:
        status, table, findings = check(cluster, "host0,host1,host2,host9", work, modules)
    finally:
        for host, other in ((1, 2), (2, 1)):
            cluster.hosts.ip(host, f"route del prohibit {host_address(other)}/32")
        cluster.unmount(1, modules)
        cluster.unmount(2, shared)
    assert status == 1
    assert re.search(r"^host1 .* 2\.8\.0 +0\.28\.1 ", table[2])
    assert re.search(r"^host2 .* missing$", table[3])
    assert re.search(r"^host9 +no( +-)+$", table[4])
    assert "cannot start on host9: ssh: Could not resolve hostname host9" in findings
    assert "See that 'ssh host9 true' works without a password" in findings
    assert "different versions of torch: 2.9.1 on host0 and host2; 2.8.0 on host1" in findings
    assert re.search(r"versions of Horovod: 0\.\S+ on host0 and host2; 0\.28\.1 on host1", findings)
    assert f"host2 cannot connect to host1 at {host_address(1)}: " in findings
    assert f"host1 cannot connect to host2 at {host_address(2)}: " in findings
    assert f"the folder {work} is missing on host2, where ranks would run in the home" in findings
    assert "A job can run" not in findings
