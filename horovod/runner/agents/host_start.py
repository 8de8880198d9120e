"""How the agent of a host is started: the one place that knows.

`static_job`, the elastic job and `host_check` call `start_agent`; `dry_run` shows `start_command`.
Which way leads to other machines is a `starter`'s to say.
"""

from __future__ import annotations

from horovod.runner.agents.host_agent import HostAgent, agent_command
from horovod.runner.agents.starter import Starter
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import is_local


def start_command(name: str, starter: Starter) -> list[str]:
    """The command that starts a host's agent."""
    return agent_command(name, None if is_local(name) else starter)


def start_agent(name: str, starter: Starter) -> HostAgent:
    """Start the agent of a host: on this machine directly, elsewhere by the starter.

    Raises `LaunchError` with the reason where not even the attempt is possible.
    """
    try:
        return HostAgent(name, None if is_local(name) else starter)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    except FileNotFoundError as error:
        why = f"there is no program {error.filename!r} here"
        raise LaunchError(why, status=127) from None
    except OSError as error:
        raise LaunchError(str(error.strerror)) from None
