"""What a launcher told this process: the seam that every launcher's file fills in.

`horovod.common.environments.detect` chooses one `Environment`; the engine takes the process's place
in the job from `Environment.topology`, and `horovod.common.rendezvous` reads `Environment.meeting`
to let the ranks find each other.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from horovod.common.topology import Topology


class RendezvousMethod(Enum):
    """How the ranks of a job find each other."""

    ALONE = "there is one rank"
    LAUNCHER_STORE = "the launcher serves the job's store and gave its address and key"
    TORCH_STORE = "through torch's TCPStore at MASTER_ADDR:MASTER_PORT"
    MPI = "through the host they share, or through MPI itself"
    SHARED_HOME = "through the host they share, or through the shared home directory"


@dataclass(frozen=True)
class Variables:
    """The names under which a launcher passes a process's place."""

    rank: str
    size: str
    local_rank: str
    local_size: str


class Environment(ABC):
    """One launcher, seen from a process that it may have started.

    A variable that is set but empty counts as unset.
    """

    name: ClassVar[str]
    meeting: ClassVar[RendezvousMethod]
    variables: ClassVar[Variables]
    job_variables: ClassVar[tuple[str, ...]] = ()
    """Variables whose values, as far as they are set, together name the job."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        """Whether this launcher's variables are there."""
        names = cls.variables
        return bool(environ.get(names.rank) or environ.get(names.size))

    def claim(self) -> tuple[int, int]:
        """Rank and size; `ValueError` when they are incomplete or contradict each other."""
        names = self.variables
        self._require_both(names.rank, names.size)
        return self._pair(names.rank, names.size)

    def local(self) -> tuple[int, int]:
        """Local rank and local size."""
        names = self.variables
        self._require_both(names.local_rank, names.local_size)
        return self._pair(names.local_rank, names.local_size)

    def cross(self) -> tuple[int, int] | None:
        """Cross rank and cross size when the launcher tells them."""
        return None

    def topology(self) -> Topology:
        """This process's place in the job.

        Where the launcher does not tell the cross rank it is computed for hosts with equally many
        ranks; the engine corrects it from the members themselves.
        """
        (rank, size), (local_rank, local_size) = self.claim(), self.local()
        if local_size > size:
            names = self.variables
            raise self._error(
                f"says that {local_size} of {size} ranks are on this host",
                names.size,
                names.local_size,
            )
        cross = self.cross() or computed_cross(rank, size, local_rank, local_size)
        return Topology(rank, size, local_rank, local_size, *cross)

    def job_id(self) -> str | None:
        """A name that all ranks of the job know and no other job has at the same time."""
        values = [self.environ[name] for name in self.job_variables if self.environ.get(name)]
        return ".".join(values) or None

    def _integer(self, name: str) -> int:
        text = self.environ[name]
        try:
            value = int(text)
        except ValueError:
            value = -1
        if value < 0:
            raise self._error(f"gives no sensible number in {name}", name)
        return value

    def _pair(self, rank_name: str, size_name: str) -> tuple[int, int]:
        rank, size = self._integer(rank_name), self._integer(size_name)
        if rank >= size:
            raise self._error("gives a rank that is not below its size", rank_name, size_name)
        return rank, size

    def _require_both(self, *names: str) -> None:
        missing = [name for name in names if not self.environ.get(name)]
        if missing:
            raise self._error(f"did not set {' and '.join(missing)}", *names)

    def _error(self, problem: str, *names: str) -> ValueError:
        seen = describe(self.environ, names)
        return ValueError(
            f"cannot tell this process's rank: {self.name} {problem} ({seen}). Start it with a "
            f"launcher, unset the variables that do not belong to this job, or set HOROVOD_RANK, "
            f"HOROVOD_SIZE, HOROVOD_LOCAL_RANK and HOROVOD_LOCAL_SIZE yourself."
        )


def describe(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """``NAME=value`` for people."""
    shown = (f"{name}={environ[name]}" if environ.get(name) else f"{name} unset" for name in names)
    return ", ".join(dict.fromkeys(shown))


def computed_cross(rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """Cross rank and size if all hosts have ``local_size`` ranks.

    Ranks are numbered host by host, or in turn over the hosts; otherwise (hosts of different
    sizes) this is a guess that is at least consistent.
    """
    num_hosts = -(-size // local_size)
    if rank % local_size == local_rank or rank // num_hosts != local_rank:
        return rank // local_size, num_hosts
    return rank % num_hosts, num_hosts
