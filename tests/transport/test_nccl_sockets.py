"""When Horovod gives NCCL more threads for its sockets, and when it leaves that to others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod.transport import select
from horovod.transport.device import nccl_sockets
from horovod.transport.device.nccl_sockets import SOCKETS, THREADS, use_spare_cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sixteen cores, no network card that NCCL knows, and no file of NCCL's; returns the cards."""
    cards = tmp_path / "net"
    (cards / "lo").mkdir(parents=True)
    for name in (THREADS, SOCKETS, "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what is set is forgotten
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(nccl_sockets, "_INTERFACES", cards)
    monkeypatch.setattr(nccl_sockets, "_FILES", (str(tmp_path / "nccl.conf"),))
    monkeypatch.setattr(nccl_sockets, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(nccl_sockets, "_chosen", {})
    return cards


def found() -> tuple[str | None, str | None]:
    return os.environ.get(THREADS), os.environ.get(SOCKETS)


@pytest.mark.parametrize(
    ("neighbours", "expected"), [(1, True), (2, True), (3, False), (16, False)]
)
def test_ranks_with_eight_cores_each_use_them(neighbours: int, expected: bool) -> None:
    assert use_spare_cores(neighbours) is expected
    assert found() == (("2", "2") if expected else (None, None))


def test_asked_again_nothing_changes() -> None:
    """As in an elastic job, whose number of ranks changes: NCCL has read the values already."""
    assert use_spare_cores(2)
    assert use_spare_cores(16)
    assert found() == ("2", "2")


@pytest.mark.parametrize("name", [THREADS, SOCKETS])
def test_what_the_user_has_set_stays(name: str) -> None:
    os.environ[name] = "1"
    assert not use_spare_cores(1)
    assert found().count("1") == 1
    assert found().count(None) == 1


@pytest.mark.parametrize("how", ["variable", "usual file"])
def test_what_a_file_of_nccls_sets_stays(how: str, tmp_path: Path) -> None:
    file = tmp_path / ("site.conf" if how == "variable" else "nccl.conf")
    file.write_text(f"NCCL_DEBUG=WARN\n{SOCKETS}=4\n")
    if how == "variable":
        os.environ["NCCL_CONF_FILE"] = str(file)
    assert not use_spare_cores(1)
    assert found() == (None, None)


@pytest.mark.parametrize("vendor", ["0x1d0f", "0x1ae0"])
def test_cards_that_nccl_knows_are_left_to_it(machine: Path, vendor: str) -> None:
    device = machine / "eth0" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    assert not use_spare_cores(1)
    (device / "vendor").write_text("0x15b3\n")
    assert use_spare_cores(1)


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", True), ("800000 100000", True), ("790000 100000", False)]
)
def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, quota: str, expected: bool) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert use_spare_cores(1) is expected


def test_containers_of_one_machine_share_its_cores() -> None:
    identities = ["pod0/boot-a/net1", "pod1/boot-a/net2", "pod2/boot-b/net1", "pod3/boot-a/net4"]
    assert [select.ranks_of_machine(identities, rank) for rank in range(4)] == [3, 3, 1, 3]
