"""How the agent of a host is started: the one place that knows.

`static_job`, the elastic job and `host_check` call `start_agent`; `dry_run` shows `start_command`.
Somebody who starts agents another way changes this module and nothing else.
"""

from __future__ import annotations

from horovod.runner.agents.host_agent import HostAgent, agent_command
from horovod.runner.agents.ssh import Ssh
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import is_local


def start_command(name: str, ssh: Ssh) -> list[str]:
    """The command that starts a host's agent."""
    return agent_command(name, None if is_local(name) else ssh)


def start_agent(name: str, ssh: Ssh) -> HostAgent:
    """Start the agent of a host: on this machine directly, elsewhere over ssh.

    Raises `LaunchError` with the reason where not even the attempt is possible.
    """
    try:
        return HostAgent(name, None if is_local(name) else ssh)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    except FileNotFoundError as error:
        why = f"there is no program {error.filename!r} here"
        raise LaunchError(why, status=127) from None
    except OSError as error:
        raise LaunchError(str(error.strerror)) from None
