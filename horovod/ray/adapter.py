"""The interface between `RayExecutor` and its two implementations, static and elastic_v2.

Both get the job's settings, which `RayExecutor.create_settings` makes, and params, which say how
many workers there are and what each needs. An adapter lives in the driver, or through Ray Client in
an actor on the cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod.common.wire import new_key

Callback = Callable[[Any], object]

Executable = tuple[type | None, Sequence[Any] | None, Mapping[str, Any] | None]
"""The object that each worker makes for itself: its class, if there is one, args and kwargs."""


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


class Adapter(ABC):
    """Starts workers, and calls functions on them."""

    @abstractmethod
    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Start the workers, each with an object of its own and these environment variables."""

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None
    ) -> list[Any]:
        """Call ``fn(executable)`` on every worker; return what each returned, by rank."""

    @abstractmethod
    def execute_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Do the same without waiting; return one ObjectRef for each rank."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone; return what it returned."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers, and give back the resources that they occupied."""
