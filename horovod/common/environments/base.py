"""What a launcher tells this process: the interface that every launcher's file implements.

`horovod.common.environments.detect` chooses one `Environment`. The engine takes the ranks of this
process from `Environment.topology`, and `horovod.common.joining.rendezvous` reads
`Environment.rendezvous` to let the ranks find each other.
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

    NOT_NEEDED = "there is one rank"
    LAUNCHER_STORE = "the launcher serves the job's store and gave its address and key"
    TORCH_STORE = "through torch's TCPStore at MASTER_ADDR:MASTER_PORT"
    MPI = "through the host they share, or through MPI itself"
    SHARED_HOME = "through the host they share, or through the shared home directory"


@dataclass(frozen=True)
class Variables:
    """The names of the variables in which a launcher passes a process its ranks."""

    rank: str
    size: str
    local_rank: str
    local_size: str


class Environment(ABC):
    """One launcher, seen from a process that it may have started.

    A variable that is set but empty counts as unset.
    """

    name: ClassVar[str]
    rendezvous: ClassVar[RendezvousMethod]
    variables: ClassVar[Variables]
    job_variables: ClassVar[tuple[str, ...]] = ()
    """Variables whose values together name the job; some of them may be unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        """Return whether this launcher's variables are set."""
        names = cls.variables
        return bool(environ.get(names.rank) or environ.get(names.size))

    def claim(self) -> tuple[int, int]:
        """Return rank and size.

        Raises:
            ValueError: They are incomplete or contradict each other.
        """
        return self._pair(self.variables.rank, self.variables.size)

    def local(self) -> tuple[int, int]:
        """Return local rank and local size; raise ValueError like `claim`."""
        return self._pair(self.variables.local_rank, self.variables.local_size)

    def cross(self) -> tuple[int, int] | None:
        """Return cross rank and cross size if the launcher tells them."""
        return None

    def topology(self) -> Topology:
        """Return the ranks and sizes of this process.

        Where the launcher does not tell the cross rank, it is computed as if all hosts had equally
        many ranks; the engine corrects it when it knows all ranks.

        Raises:
            ValueError: The variables are incomplete or contradict each other.
        """
        (rank, size), (local_rank, local_size) = self.claim(), self.local()
        if local_size > size:
            names = self.variables
            raise self._error(
                f"says that {local_size} of {size} ranks are on this host",
                names.size,
                names.local_size,
            )
        cross = self.cross() or compute_cross(rank, size, local_rank, local_size)
        return Topology(rank, size, local_rank, local_size, *cross)

    def job_id(self) -> str | None:
        """Return a name that all ranks of the job know and no other running job has, if any."""
        values = [self.environ[name] for name in self.job_variables if self.environ.get(name)]
        return ".".join(values) or None

    def _integer(self, name: str) -> int:
        """Return the number in a variable."""
        text = self.environ[name]
        try:
            value = int(text)
        except ValueError:
            value = -1
        if value < 0:
            raise self._error(f"gives no sensible number in {name}", name)
        return value

    def _pair(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """Return a rank and the size that it is below, from two variables."""
        self._require(rank_name, size_name)
        rank, size = self._integer(rank_name), self._integer(size_name)
        if rank >= size:
            raise self._error("gives a rank that is not below its size", rank_name, size_name)
        return rank, size

    def _require(self, *names: str) -> None:
        """Raise ValueError if one of the variables is not set."""
        missing = [name for name in names if not self.environ.get(name)]
        if missing:
            raise self._error(f"did not set {' and '.join(missing)}", *names)

    def _error(self, problem: str, *names: str) -> ValueError:
        """Return the error for variables from which no rank follows."""
        values = describe(self.environ, names)
        return ValueError(
            f"cannot tell this process's rank: {self.name} {problem} ({values}). Start it with a "
            f"launcher, unset the variables that do not belong to this job, or set HOROVOD_RANK, "
            f"HOROVOD_SIZE, HOROVOD_LOCAL_RANK and HOROVOD_LOCAL_SIZE yourself."
        )


def describe(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the variables and their values as text for people."""
    shown = (f"{name}={environ[name]}" if environ.get(name) else f"{name} unset" for name in names)
    return ", ".join(dict.fromkeys(shown))


def compute_cross(rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """Return cross rank and size of a process, as if all hosts had `local_size` ranks.

    Ranks may be numbered host by host, or in turn over the hosts. Where hosts have different sizes
    the result is a guess, but a consistent one.
    """
    num_hosts = -(-size // local_size)
    if rank % local_size == local_rank or rank // num_hosts != local_rank:
        return rank // local_size, num_hosts
    return rank % num_hosts, num_hosts
