"""What programs that start elastic jobs hand to `horovod.runner.gloo_run.gloo_run_elastic`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.runner.common.util.settings import BaseSettings, as_arguments
from horovod.runner.elastic.discovery import HostDiscovery


@dataclass(kw_only=True)
class ElasticSettings(BaseSettings):
    """Of an elastic job; `discovery` says which hosts there are, and stays where it is."""

    discovery: HostDiscovery | None
    min_num_proc: int | None
    max_num_proc: int | None
    elastic_timeout: float | None
    reset_limit: int | None
    cooldown_range: tuple[int, int] | None = None
    elastic: bool = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "discovery": None}  # it may hold processes or connections


def as_elastic_arguments(settings: ElasticSettings) -> list[str]:
    """The options of horovodrun that say the same, but for the discovery."""
    values = {
        "--min-np": settings.min_num_proc or settings.num_proc or 1,
        "--max-np": settings.max_num_proc,
        "--elastic-timeout": settings.elastic_timeout,
        "--reset-limit": settings.reset_limit,
    }
    arguments = [f"{name}={value}" for name, value in values.items() if value is not None]
    if settings.cooldown_range is not None:
        arguments += ["--blacklist-cooldown-range", *map(str, settings.cooldown_range)]
    return [*as_arguments(settings), *arguments]
