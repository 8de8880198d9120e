"""The command line for ssh, as a shell on the other side understands it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.runner.agents.starters import Ssh, agent_command
from tests.effort import examples

ANYTHING = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
NASTY = st.one_of(
    ANYTHING,
    st.sampled_from(["$(touch pwned)", "`id`", "a b", "'", '"', "\n", "\\", "; exit 1", "*"]),
)


@settings(deadline=None, max_examples=examples(40))
@given(arguments=st.lists(NASTY, max_size=4))
def test_arguments_pass_through_a_real_shell_unharmed(arguments: list[str]):
    shown = "import os, sys; os.write(1, repr(sys.argv[1:]).encode('utf-8', 'surrogateescape'))"
    command = Ssh().command(
        "host", [sys.executable, "-I", "-S", "-X", "utf8", "-c", shown, *arguments]
    )
    done = subprocess.run(["/bin/sh", "-c", command[-1]], capture_output=True, check=True)
    assert done.stdout.decode() == repr(arguments)


@given(name=NASTY)
def test_a_name_is_passed_whole_or_not_at_all(name: str):
    try:
        command = Ssh(port=2222, identity_file="my key").command(name, ["true"])
    except ValueError:
        return
    assert command[-3:] == [name, "--", "exec true"]
    assert not name.startswith("-")
    assert not set(name) & set(" \t\n'\"`$();&|<>*?!{}[]#~\\")


@pytest.mark.parametrize("name", ["", "-oProxyCommand=touch pwned", "-p", "a b", "a;b", "$(id)"])
def test_names_that_are_options_or_commands_are_refused(name: str):
    with pytest.raises(ValueError, match="cannot be the name of a host"):
        Ssh().command(name, ["true"])


@pytest.mark.parametrize("name", ["node1", "node-1.example.org", "fe80::2%eth0", "::1", "me@node1"])
def test_names_of_hosts(name: str):
    assert Ssh().command(name, ["true"])[-3:] == [name, "--", "exec true"]


def test_options_reach_ssh():
    command = Ssh(port=2222, identity_file="keys/my key", connect_timeout=2.5).command(
        "h", ["true"]
    )
    assert command[command.index("-p") + 1] == "2222"
    assert command[command.index("-i") + 1] == "keys/my key"
    assert "ConnectTimeout=3" in command
    assert "BatchMode=yes" in command
    assert not any("StrictHostKeyChecking" in word for word in command)  # the user's to decide


def test_the_agents_command_is_plain_for_every_shell():
    """The login shell on the other side may be csh or fish, which quote in their own ways."""
    (*_, remote) = agent_command("host", Ssh())
    program = remote.partition("'")[2].rpartition("'")[0]
    assert not set(program) & set("'\\!\n$`")
    assert os.path.basename(sys.executable) in remote
