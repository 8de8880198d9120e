"""Settings of a job on Ray besides its size: `RayExecutor.create_settings` makes them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from horovod.common.wire import new_key


@dataclass
class MiniSettings:
    """Settings of a job. Its ranks authenticate each other with the key, which is never shown.

    `timeout_s` is how long the ranks may take to find each other once they run,
    `placement_group_timeout_s` how long Ray may take to find room for them. `nics` are the
    interfaces to keep the traffic on. Settings for ssh have no effect: Ray starts the processes.
    """

    nics: Collection[str] | None = None
    verbose: int = 1
    key: bytes | None = field(default_factory=new_key, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> float:
        """Seconds for the ranks to find each other."""
        return self.timeout_s


@dataclass
class ElasticRaySettings(MiniSettings):
    """Settings with the limits of an elastic job, made by `ElasticRayExecutor.create_settings`."""

    elastic: bool = True
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    elastic_timeout: float = 600
    discovery: Any = None


def nics_of(settings: Any) -> list[str]:
    """Return the interfaces that the settings name, in a stable order."""
    return sorted(settings.nics or ())


def key_of(settings: Any) -> bytes:
    """Return the settings' key, or a new one if they have none."""
    return getattr(settings, "key", None) or new_key()
