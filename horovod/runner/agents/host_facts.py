"""What an agent says about its host when it begins: the event "hello".

Part of the agent, so nothing but the standard library.
"""

from __future__ import annotations

import os

from horovod.runner.agents.cores import usable_cores

TYPE_CHECKING = False  # as in typing, whose import would delay the agent's start
if TYPE_CHECKING:
    from typing import Any


def host_facts() -> dict[str, Any]:
    """Who and where the agent is, and what it was told about the way to the launcher."""
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "machine": os.uname().machine,
        "cores": usable_cores(),
        "ssh": os.environ.get("SSH_CONNECTION", ""),
        "launcher": os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
    }
