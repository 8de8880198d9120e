"""What --check makes of its findings, on made-up hosts."""

from __future__ import annotations

from typing import Any

import pytest

from horovod.runner.jobs.check_report import (
    HostReport,
    describe,
    describe_gpus,
    describe_rate,
    find_problems,
    make_table,
)


def host(number: int, **changes: Any) -> HostReport:
    """A host like all others, but for some facts."""
    facts = {
        "python": "3.11.2",
        "executable": "/usr/bin/python3",
        "torch": "2.9.1",
        "horovod": "0.29.0",
        "nccl": "2.27.5",
        "driver": "570.86.15",
        "gpus": ["H100"] * 4,
        "memory": 64 << 30,
        "lost_folder": "",
        "content": "abc",
        "missing": [],
        "port": 4000,
    }
    facts |= {name: changes.pop(name) for name in list(changes) if name in facts}
    report = HostReport(f"n{number}", 4, "ssh", "", 16, f"10.0.0.{number}", "eth0", facts, 0.0)
    for name, value in changes.items():
        setattr(report, name, value)
    return report


def ring(rates: list[float]) -> list[HostReport]:
    """Hosts that each send to the next at one of these rates."""
    count = len(rates)
    return [
        host(i, links={f"n{(i + 1) % count}": {"seconds": 2e-4, "rate": rate}})
        for i, rate in enumerate(rates)
    ]


def texts(*hosts: HostReport, wanted: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """What would keep a job from running, and what is only worth knowing."""
    found = find_problems(hosts, "abc", wanted)
    return [f.text for f in found if f.is_fatal], [f.text for f in found if not f.is_fatal]


def test_nothing_is_wrong():
    hosts = [host(1), host(2)]
    assert texts(*hosts) == ([], [])
    assert describe(hosts, [], "abc").endswith("\n\nA job can run on these 2 hosts.")
    assert describe([host(1)], [], "abc").endswith("A job can run on this host.")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"torch": "2.8.0"}, "versions of torch: 2.9.1 on n1 and n3; 2.8.0 on n2. Install"),
        ({"torch": ""}, "versions of torch: 2.9.1 on n1 and n3; none on n2."),
        ({"horovod": "0.28.1"}, "versions of Horovod: 0.29.0 on n1 and n3; 0.28.1 on n2."),
        ({"horovod": ""}, "/usr/bin/python3 on n2 has no Horovod. Install it there"),
        ({"python": "3.12.1"}, "versions of Python: 3.11 on n1 and n3; 3.12 on n2."),
        ({"nccl": "2.21.5"}, "versions of NCCL: 2.27.5 on n1 and n3; 2.21.5 on n2."),
        ({"trouble": "cannot start on n2: no route"}, "cannot start on n2: no route"),
        ({"lost_folder": "/job"}, "the folder /job is missing on n2, where ranks would run in"),
        ({"missing": ["train.py"]}, "train.py, which the command needs, is missing on n2: copy"),
        ({"links": {"n3": {"error": "timed out"}}}, "n2 cannot connect to n3 at 10.0.0.3: timed"),
    ],
)
def test_what_would_make_a_job_fail(changes: dict[str, Any], sentence: str):
    fatal, lesser = texts(host(1), host(2, **changes), host(3), wanted=("python", "train.py"))
    (found,) = fatal
    assert sentence in found
    assert lesser == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"driver": "535.1"}, "versions of GPU driver: 570.86.15 on n1 and n3; 535.1 on n2."),
        ({"content": "other"}, "the working folder of n2 has other files than the one here."),
        ({"clock": 3.24, "clock_error": 0.1}, "the clock of n2 is 3.2 s ahead of this machine's"),
        ({"clock": -9.0, "clock_error": 0.1}, "the clock of n2 is 9.0 s behind this machine's"),
        ({"gpus": ["A100"] * 4}, "different GPUs: 4 x H100 on n1 and n3; 4 x A100 on n2."),
        ({"slots": 5}, "n2 has 4 GPUs for 5 ranks, which then share them or use the CPU."),
    ],
)
def test_what_is_worth_knowing(changes: dict[str, Any], sentence: str):
    fatal, lesser = texts(host(1), host(2, **changes), host(3))
    (found,) = lesser
    assert sentence in found
    assert fatal == []


def test_no_torch_anywhere():
    fatal, _ = texts(host(1, torch=""), host(2, torch=""))
    assert fatal == [
        "there is no PyTorch, which Horovod needs with every framework: pip install torch"
    ]
    (fatal,), _ = texts(host(1, torch="", horovod=""))
    assert "has no Horovod" in fatal  # says it all


def test_what_is_no_problem():
    assert texts(host(1), host(2, python="3.11.9")) == ([], [])  # the same but for fixes
    assert texts(host(1), host(2, clock=0.9, clock_error=0.6)) == ([], [])  # slow answers
    assert texts(host(1, gpus=[]), host(2, gpus=[])) == ([], [])  # CPUs: slots are cores


def test_a_host_that_several_cannot_reach_is_named_once():
    closed = {"n2": {"error": "Connection refused"}}
    fatal, _ = texts(host(1, links=closed), host(2), host(3, links=closed))
    (found,) = fatal
    assert found.startswith("n1 and n3 cannot connect to n2 at 10.0.0.2: Connection refused. Ranks")


def test_a_slow_link_is_told_beside_others():
    _, lesser = texts(*ring([1e9, 1.1e9, 1e8, 0.9e9]))
    (found,) = lesser
    assert found.startswith("n2 sends to n3 at 800 Mbit/s, while others have 7.6 Gbit/s")
    assert texts(*ring([1e9, 1e8])) == ([], [])  # nobody to compare with


def test_table():
    hosts = ring([1e9, 1e8, 1e9])
    hosts[1].clock, hosts[1].clock_error = 0.25, 0.001
    hosts[2].links = {"n0": {"error": "timed out"}}
    hosts.append(HostReport("n3", trouble="cannot start on n3: no route"))
    lines = [line.split("  ") for line in make_table(hosts, "abc").splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == [
        *("host", "reached", "Python", "torch", "Horovod", "NCCL", "driver", "GPUs", "cores"),
        *("memory", "clock", "address", "ports", "to next host", "folder"),
    ]
    same = ["ssh", "3.11.2", "2.9.1", "0.29.0", "2.27.5", "570.86.15", "4 x H100", "16", "64 GiB"]
    assert cells[1] == [
        *("n0", *same, "same", "eth0 10.0.0.0", "out only", "0.20 ms, 8 Gbit/s", "same"),
    ]
    assert cells[2][10:14] == ["+250 ms", "eth0 10.0.0.1", "both ways", "0.20 ms, 800 Mbit/s"]
    assert cells[3][10:14] == ["same", "eth0 10.0.0.2", "in only", "same"]
    assert cells[4] == ["n3", "no", *["-"] * 13]
    without = [host(1, gpus=[], driver="", nccl="")]
    assert not {"NCCL", "driver", "GPUs"} & set(make_table(without, "abc").split())


def test_on_a_narrow_terminal_what_all_have_is_told_once():
    hosts = ring([1e9, 1e8, 1e9])
    hosts[2].facts = {**hosts[2].facts, "torch": "2.8.0"}
    hosts.append(HostReport("n3", trouble="cannot start on n3: no route"))
    wide = make_table(hosts, "abc", 200)
    assert wide == make_table(hosts, "abc")
    narrow = make_table(hosts, "abc", 100).splitlines()
    assert narrow[0].split() == ["host", "reached", "torch", "address", "to", "next", "host"]
    assert narrow[3].split()[:3] == ["n2", "ssh", "2.8.0"]
    assert narrow[4].split() == ["n3", "no", "-", "-", "-"]
    below = " ".join(narrow[5:])
    assert below.startswith("On all of them: Python 3.11.2, Horovod 0.29.0, NCCL 2.27.5, driver")
    assert below.endswith("ports both ways, folder same")
    assert max(map(len, narrow)) <= 100


def test_units():
    assert [describe_rate(rate) for rate in (1.25e9, 1.25e6, 900)] == [
        *("10 Gbit/s", "10 Mbit/s", "7.2 kbit/s"),
    ]
    assert describe_gpus(["A", "B", "A"]) == "2 x A, 1 x B"
