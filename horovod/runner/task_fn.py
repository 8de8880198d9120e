"""Upstream's process on every host that looks for network interfaces: not offered.

Here the host's agent does that (`horovod.runner.agents.probe`), over the launcher's own connection
to it.
"""

from __future__ import annotations

from typing import Any

from horovod.runner.common.unavailable import SERVICE, unavailable


def _task_fn(index: int, num_hosts: int, driver_addresses: Any, settings: Any) -> None:
    raise unavailable("_task_fn", *SERVICE)


if __name__ == "__main__":
    raise SystemExit(str(unavailable("python -m horovod.runner.task_fn", *SERVICE)))
