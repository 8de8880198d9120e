"""Which hosts there are: scripts, lists, and what a manager makes of their answers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from horovod.runner.elastic.discovery import (
    FixedHosts,
    HostDiscovery,
    HostDiscoveryScript,
    HostManager,
    HostPoller,
    HostUpdateResult,
)
from horovod.runner.options.arguments import make_options


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "discover"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_script_prints_hosts(tmp_path: Path):
    path = script(tmp_path, "echo node1:4; echo; echo ' node2 '; echo 'node[3-4]:1'")
    found = HostDiscoveryScript(path, 2).find_available_hosts_and_slots()
    assert found == {"node1": 4, "node2": 2, "node3": 1, "node4": 1}


def test_hosts_without_a_slot_are_not_there(tmp_path: Path):
    path = script(tmp_path, "echo node1:0; echo node2:1; echo node3:0")
    assert HostDiscoveryScript(path, 2).find_available_hosts_and_slots() == {"node2": 1}
    path = script(tmp_path, "echo node1:0")
    assert HostDiscoveryScript(path, 2).find_available_hosts_and_slots() == {}


def test_a_command_line_with_arguments(tmp_path: Path):
    path = script(tmp_path, 'printf "%s:3\\n" "$@"')
    found = HostDiscoveryScript(f"{path} one 'two' \"three\"", None)
    assert found.find_available_hosts_and_slots() == {"one": 3, "two": 3, "three": 3}
    found = HostDiscoveryScript("sh -c 'echo four:4 | cat; echo $HOST:1' x", None)
    with pytest.raises(ValueError, match="printed ':1'"):
        found.find_available_hosts_and_slots()


def test_nothing_in_a_command_line_is_expanded(tmp_path: Path):
    path = script(tmp_path, 'for each in "$@"; do [ "$each" = "$HOME" ] && exit 7; done; echo a:1')
    text = f"{path} '$HOME' $HOME $(touch {tmp_path}/no) *"
    with pytest.raises(ValueError, match=r"'\('.*a shell"):
        HostDiscoveryScript(text, None)
    found = HostDiscoveryScript(f"{path} '$HOME' $HOME `touch {tmp_path}/no` *", None)
    assert found.find_available_hosts_and_slots() == {"a": 1}
    assert not (tmp_path / "no").exists()


def test_a_script_without_a_shebang_is_run_by_sh(tmp_path: Path):
    path = tmp_path / "a script"
    path.write_text("echo node1:${1:-2}\n")
    path.chmod(0o755)
    found = HostDiscoveryScript(str(path), None).find_available_hosts_and_slots()
    assert found == {"node1": 2}
    found = HostDiscoveryScript(f"'{path}' 5", None).find_available_hosts_and_slots()
    assert found == {"node1": 5}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("no-such-program --x", "there is no program 'no-such-program'"),
        ("./plain 3", "'./plain' is not executable; try: chmod +x ./plain"),
        ("./runs 'x", "is not a command line: No closing quotation"),
        ("./runs | sort", "has '|', for which it would need a shell"),
        ("./runs; reboot", "has ';', for which it would need a shell"),
        ("./folder", "there is no program './folder'"),
    ],
)
def test_commands_that_cannot_run_are_refused_before_the_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("echo a:1")
    (tmp_path / "runs").write_text("echo a:1")
    (tmp_path / "runs").chmod(0o755)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="--host-discovery-script") as refused:
        make_options([f"--host-discovery-script={text}", "--min-np", "1", "python"])
    assert says in str(refused.value)
    options = make_options(["--host-discovery-script=./runs 'a b' '|'", "--min-np=1", "x"])
    assert options.host_discovery_script == f"{tmp_path}/runs 'a b' '|'"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo node1", "printed 'node1': it has no number of slots"),
        ("echo node1:many", "printed 'node1:many'"),
        ("echo -oProxyCommand=x:1", "printed '-oProxyCommand=x:1'"),
        ("echo trouble >&2; exit 3", "ended with exit code 3: trouble"),
        ("exit 4", "ended with exit code 4 and wrote nothing to stderr"),
    ],
)
def test_a_script_that_fails(tmp_path: Path, text: str, says: str):
    discovery = HostDiscoveryScript(script(tmp_path, text), None)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        discovery.find_available_hosts_and_slots()
    assert says in str(caught.value)


def test_a_script_that_hangs_is_killed_with_its_children(tmp_path: Path):
    discovery = HostDiscoveryScript(script(tmp_path, "sleep 1000"), None, timeout=0.3)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.3 s"):
        discovery.find_available_hosts_and_slots()


def test_changes_are_named():
    fixed = FixedHosts({"a": 2})
    manager = HostManager(fixed)
    changes = []
    for hosts in ({"a": 2}, {"a": 2}, {"a": 2, "b": 1}, {"a": 1, "b": 1}, {"b": 2}, {"c": 1}):
        fixed.set(hosts)
        changes.append(manager.update_available_hosts())
    flags = HostUpdateResult
    assert changes == [
        flags.added,
        flags.no_update,
        flags.added,
        flags.removed,
        flags.mixed,
        flags.mixed,
    ]


def test_known_hosts_keep_their_order():
    manager = HostManager(FixedHosts({}))
    manager.take({"b": 1, "a": 1})
    manager.take({"a": 1, "c": 2, "b": 1})
    hosts = manager.current_hosts
    assert hosts.host_assignment_order == ("b", "a", "c")
    manager.take({"a": 1})
    assert hosts.host_assignment_order == ("b", "a", "c"), "a snapshot does not change"


def test_a_blacklisted_host_does_not_count():
    manager = HostManager(FixedHosts({"a": 2, "b": 3}))
    manager.update_available_hosts()
    manager.blacklist("a")
    hosts = manager.current_hosts
    assert manager.is_blacklisted("a")
    assert hosts.available_hosts == {"b"}
    assert hosts.count_available_slots() == 3
    assert hosts.get_slots("a") == 2


def test_a_host_that_may_be_used_again_is_an_addition():
    manager = HostManager(FixedHosts({"a": 2}), cooldown_range=(0.05, 0.05))
    manager.update_available_hosts()
    manager.blacklist("a")
    deadline = time.monotonic() + 100
    while manager.is_blacklisted("a"):
        assert time.monotonic() < deadline
    assert manager.update_available_hosts() == HostUpdateResult.added


def test_a_failure_of_another_host_does_not_hide_one_that_may_be_used_again(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    manager = HostManager(FixedHosts({"a": 1, "b": 1}), cooldown_range=(10, 10), max_failures=2)
    manager.update_available_hosts()
    manager.blacklist("a")
    now = 20.0
    assert not manager.record_failure("b")
    assert manager.update_available_hosts() == HostUpdateResult.added


def test_slots_given_back_come_with_the_next_offer():
    manager = HostManager(FixedHosts({"a": 2}))
    manager.update_available_hosts()
    manager.give_back("a")
    manager.update_available_hosts()
    assert manager.current_hosts.get_slots("a") == 1
    manager.take({"a": 3})
    assert manager.current_hosts.get_slots("a") == 3


class _Moody(HostDiscovery):
    """Fails every other time."""

    def __init__(self) -> None:
        self.times = 0

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        self.times += 1
        if self.times % 2:
            raise OSError("not now")
        return {"a": self.times}


def test_answers_and_failures_are_told():
    answers: list[dict[str, int] | Exception] = []
    enough = threading.Event()

    def tell(answer: dict[str, int] | Exception) -> None:
        answers.append(answer)
        if len(answers) >= 3:
            enough.set()

    poller = HostPoller(_Moody(), tell, 0.0)
    assert enough.wait(100)
    poller.close()
    assert [str(answer) for answer in answers[:3]] == ["not now", "{'a': 2}", "not now"]


def test_closing_ends_a_script_that_runs(tmp_path: Path):
    began = tmp_path / "began"
    discovery = HostDiscoveryScript(script(tmp_path, f"touch {began}; sleep 1000"), None)
    poller = HostPoller(discovery, lambda answer: None, 1.0)
    deadline = time.monotonic() + 100
    while not began.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between looks at the file system
    poller.close()
    deadline = time.monotonic() + 100
    while poller.running:  # it gives up waiting after a few seconds; the script is ended by then
        assert time.monotonic() < deadline
        time.sleep(0.01)
