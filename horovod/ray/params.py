"""Describe how many workers a job has and what each needs, for the adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class BaseParams:
    """The resources that one worker needs."""

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ValueError("gpus_per_worker is given, but use_gpu is not set")
        if self.gpus_per_worker is not None and self.gpus_per_worker < 1:
            raise ValueError(f"gpus_per_worker must be at least 1, not {self.gpus_per_worker}")
        if self.cpus_per_worker < 0:
            raise ValueError(f"cpus_per_worker must not be negative: {self.cpus_per_worker}")

    @property
    def gpus(self) -> int:
        """GPUs of each worker."""
        return (self.gpus_per_worker or 1) if self.use_gpu else 0

    @property
    def resources(self) -> dict[str, float]:
        """The resources that Ray has to find for each worker."""
        wanted = {"CPU": self.cpus_per_worker, "GPU": self.gpus}
        return {name: float(amount) for name, amount in wanted.items() if amount}


@dataclass(kw_only=True)
class StaticParams(BaseParams):
    """A fixed number of workers: in all, or on each of several nodes."""

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers is not None and self.num_hosts is not None:
            raise ValueError(
                "give num_workers, or num_hosts with num_workers_per_host, but not both: "
                f"num_workers={self.num_workers}, num_hosts={self.num_hosts}"
            )
        if self.num_workers is None and self.num_hosts is None:
            raise ValueError(
                "say how many workers there are: num_workers, or num_hosts with "
                "num_workers_per_host, or min_workers for an elastic job"
            )
        for name in ("num_workers", "num_hosts", "num_workers_per_host"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(kw_only=True)
class ElasticParams(BaseParams):
    """A number of workers that may change; with `override_discovery` Ray finds their nodes."""

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_workers < 1:
            raise ValueError(f"min_workers must be at least 1, not {self.min_workers}")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers={self.max_workers} is less than min_workers={self.min_workers}"
            )
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ValueError(f"reset_limit must not be negative: {self.reset_limit}")
        if self.cooldown_range is not None:
            least, most = self.cooldown_range
            if not 0 < least <= most:
                raise ValueError(
                    f"cooldown_range must be (least, most) seconds, not {self.cooldown_range}"
                )
