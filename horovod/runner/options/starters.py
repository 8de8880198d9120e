"""Which way leads to other hosts: chosen from the options and from where horovodrun runs.

`horovod.runner.jobs.request` and the elastic job call `make_starter`, for agents that horovodrun
starts itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from horovod.runner.agents.srun import Srun, is_allocation
from horovod.runner.agents.ssh import Ssh
from horovod.runner.agents.starter import CommandStarter, Starter


def make_starter(
    options: argparse.Namespace, environ: Mapping[str, str], timeout: float
) -> Starter:
    """The command that was asked for; srun inside a Slurm job; else ssh.

    Port and key of ssh are a wish for ssh, also inside a Slurm job.
    """
    if options.start_command is not None:
        return CommandStarter(options.start_command)
    wants_ssh = options.ssh_port is not None or options.ssh_identity_file is not None
    if is_allocation(environ) and not wants_ssh:
        return Srun(environ)
    return Ssh(options.ssh_port, options.ssh_identity_file, timeout)
