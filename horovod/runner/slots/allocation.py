"""Find the hosts that a batch system, or a Kubernetes MPI job, has given to this process.

`arguments` calls `find_allocation` if neither ``-H`` nor a hostfile names hosts. `READERS` is the
table of systems: the name of each, the variables that show that it is there, and the function that
reads its hosts. Readers are pure functions of the environment and of the files that it names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.environments.slurm import tasks_per_node
from horovod.observe.reports.amounts import count_of
from horovod.runner.slots.hosts import (
    COMMA,
    Host,
    checked_name,
    merge_hosts,
    name_pieces,
    parse_hostfile,
    plan_slots,
    slot_count,
)

Environ = Mapping[str, str]

_HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",  # Open MPI 4
    "PRTE_MCA_prte_default_hostfile",  # Open MPI 5
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
_OPERATOR_HOSTFILE = "/etc/mpi/hostfile"
"""The hostfile of Kubeflow's MPI operator and Trainer, whichever MPI they start."""


@dataclass(frozen=True)
class Allocation:
    """Hosts, and the name of the job to which they were given, such as ``Slurm job 123``."""

    name: str
    hosts: Sequence[Host]
    advice: str  # how to get more slots from that system

    @property
    def slots(self) -> int | None:
        """The number of slots of all hosts; None if the system does not say."""
        counts = [host.slots for host in self.hosts if host.slots is not None]
        return sum(counts) if len(counts) == len(self.hosts) else None

    def __str__(self) -> str:
        nodes = count_of(len(self.hosts), "node")
        return f"{self.name}: {nodes}" + (f", {count_of(self.slots, 'slot')}" if self.slots else "")

    def check_size(self, num_proc: int | None) -> None:
        """Raise `ValueError` if there are too few slots, or if no number of processes is known."""
        if self.slots is None and num_proc is None:
            raise ValueError(
                f"{self}, and no number of slots; say how many processes to run with -np"
            )
        if self.slots is not None and num_proc is not None and num_proc > self.slots:
            example = ",".join(
                f"{host.name}:{-(-num_proc // len(self.hosts))}" for host in self.hosts[:2]
            )
            more = ",..." if len(self.hosts) > 2 else ""
            raise ValueError(
                f"{self}, but {num_proc} processes are to run; {self.advice}, give a smaller -np, "
                f"or say yourself how many run on each host: -H {example}{more}"
            )

    def describe(self, num_proc: int | None) -> list[str]:
        """Return lines for people: the allocation, and how many nodes a job leaves unused."""
        if num_proc is None:
            return [str(self)]
        used = {slot.hostname for slot in plan_slots(self.hosts, num_proc)}
        unused = len(self.hosts) - len(used)
        if not unused:
            return [str(self)]
        stay = "stays" if unused == 1 else "stay"
        return [
            str(self),
            f"{unused} of {len(self.hosts)} nodes {stay} unused: -np {num_proc} fills one node "
            f"after the other; -H NAME:SLOTS,... spreads the ranks",
        ]


@dataclass(frozen=True)
class Reader:
    """The rules for one system that hands out hosts."""

    name: str
    variables: Sequence[str]  # any of them shows that the system is there
    read: Callable[[Environ], list[Host]]  # no hosts: the system is not there after all
    advice: str = "ask it for more slots"
    job: Sequence[str] = ()  # variables with the job's number, if others; the first set one counts

    def find(self, environ: Environ) -> Allocation | None:
        """Return this system's allocation; None outside of it."""
        if self.variables and not any(environ.get(name) for name in self.variables):
            return None
        hosts = self.read(environ)
        if not hosts:
            return None
        numbers = (environ[name] for name in self.job or self.variables if environ.get(name))
        number = next(numbers, "")
        return Allocation(f"{self.name} {number}".strip(), hosts, self.advice)


def find_allocation(environ: Environ) -> Allocation | None:
    """Return the hosts that a batch system has given to this process.

    Args:
        environ: The environment of this process.

    Returns:
        The allocation; None outside of all the systems of `READERS`.

    Raises:
        ValueError: If a variable or a file cannot be understood; the message has its name and text.
    """
    found = (reader.find(environ) for reader in READERS)
    return next((allocation for allocation in found if allocation is not None), None)


# -- readers ---------------------------------------------------------------------------------


def read_lsf(environ: Environ) -> list[Host]:
    """Read ``LSB_MCPU_HOSTS``: pairs of host and slots."""
    words = environ.get("LSB_MCPU_HOSTS", "").split() if environ.get("LSB_JOBID") else []
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts):
        raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)!r} is not pairs of host and slots")
    try:
        hosts = [
            Host(checked_name(name), slot_count(count))
            for name, count in zip(names, counts, strict=True)
        ]
    except ValueError as error:
        raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)!r}: {error}") from None
    if environ.get("CSM_ALLOCATION_ID") and len(hosts) > 1:
        return hosts[1:]  # such clusters list the node of the batch script first; it has no GPUs
    return hosts


def _read_slurm(environ: Environ) -> list[Host]:
    if not environ.get("SLURM_HET_SIZE"):
        return _slurm_group(environ, "")
    return merge_hosts(itertools.chain(*slurm_groups(environ)))


def slurm_groups(environ: Environ) -> list[list[Host]]:
    """Return the hosts of each group of a heterogeneous Slurm job; none for other jobs."""
    size = environ.get("SLURM_HET_SIZE", "")
    if size and not size.isdecimal():
        raise ValueError(f"SLURM_HET_SIZE={size!r} is not a number")
    # Each group has variables of its own.
    return [_slurm_group(environ, f"_HET_GROUP_{group}") for group in range(int(size or 0))]


def _slurm_group(environ: Environ, suffix: str) -> list[Host]:
    names: list[str] = []
    for variable in (f"SLURM_JOB_NODELIST{suffix}", f"SLURM_NODELIST{suffix}"):
        if environ.get(variable):
            try:
                names = expand_nodelist(environ[variable])
            except ValueError as error:
                raise ValueError(f"{variable}={environ[variable]!r}: {error}") from None
            break
    counts = _slurm_slots(environ, suffix, len(names)) if names else None
    if counts is None:
        return [Host(name) for name in names]
    return [Host(name, count) for name, count in zip(names, counts, strict=True) if count]


def _slurm_slots(environ: Environ, suffix: str, nodes: int) -> list[int] | None:
    """Return how many ranks each node takes: its tasks, else GPUs, else cores; None if unknown.

    Inside a step, such as an interactive shell, the variables on tasks may be the step's, which
    does not have all nodes of the job. Variables that do not fit the job's nodes are ignored.
    """

    def numbers(variable: str) -> list[int]:
        text = environ.get(f"{variable}{suffix}", "")
        try:
            found = tasks_per_node(text) if text else []
        except ValueError as error:
            raise ValueError(f"{variable}{suffix}: {error}") from None
        return found if len(found) in (1, nodes) else []

    tasks = numbers("SLURM_NTASKS")
    per_node = numbers("SLURM_NTASKS_PER_NODE")
    if (tasks and tasks[0] >= nodes) or per_node:
        on_each = numbers("SLURM_TASKS_PER_NODE")
        if len(on_each) == nodes and (not tasks or sum(on_each) == tasks[0]):
            return on_each
        if per_node:
            return per_node * nodes
        return [tasks[0] // nodes + (index < tasks[0] % nodes) for index in range(nodes)]
    gpus = re.search(r"(\d{1,6})$", environ.get(f"SLURM_GPUS_PER_NODE{suffix}", ""), re.ASCII)
    if gpus:  # 4, or gpu:4, or a100:4
        return [int(gpus[1])] * nodes
    cores = numbers("SLURM_JOB_CPUS_PER_NODE")
    each = numbers("SLURM_CPUS_PER_TASK") or [1]
    return [max(1, count // each[0]) for count in cores] if len(cores) == nodes else None


def expand_nodelist(text: str) -> list[str]:
    """Return the names in a Slurm node list, in the order of ``scontrol show hostnames``.

    Items such as ``r[1-2]n[08-10,12]`` are separated by commas. In an item with several brackets
    the last varies fastest; after it, as in Slurm, the first, the second and so on.
    """
    names: list[str] = []
    for item in COMMA.split(text.strip()):
        pieces = name_pieces(item)
        brackets = list(range(1, len(pieces), 2))
        slowest_first = [*reversed(brackets[:-1]), *brackets[-1:]]
        for numbers in itertools.product(*(pieces[index] for index in slowest_first)):
            chosen = dict(zip(slowest_first, numbers, strict=True))
            name = "".join(chosen.get(index, piece[0]) for index, piece in enumerate(pieces))
            try:
                names.append(checked_name(name))
            except ValueError:
                raise ValueError(f"{item!r} is not a list of nodes such as n[01-04]") from None
    return names


def _read_pbs(environ: Environ) -> list[Host]:
    """Read a file with a line for each process.

    If each host has one line only, Torque's number of processors per node counts.
    """
    hosts = _hosts_of_lines("PBS_NODEFILE", environ)
    each = environ.get("PBS_NUM_PPN", "")
    if each and all(host.slots == 1 for host in hosts):
        try:
            return [Host(host.name, slot_count(each)) for host in hosts]
        except ValueError as error:
            raise ValueError(f"PBS_NUM_PPN={each!r}: {error}") from None
    return hosts


def _read_cobalt(environ: Environ) -> list[Host]:
    """Read a file with a line for each node; the number of processes is unknown."""
    hosts = _hosts_of_lines("COBALT_NODEFILE", environ)
    return [Host(host.name) for host in hosts]


def _read_sge(environ: Environ) -> list[Host]:
    """Read lines of host, slots, queue and processors."""
    return _hosts_of_lines("PE_HOSTFILE", environ, with_slots=True)


def _hosts_of_lines(variable: str, environ: Environ, with_slots: bool = False) -> list[Host]:
    """Read a file with a host on each line; a host on several lines has that many slots."""
    hosts = []
    for number, line in enumerate(_lines(variable, environ[variable]), start=1):
        words = line.split()
        if not words:
            continue
        try:
            count = slot_count(words[1] if len(words) > 1 else "") if with_slots else 1
            hosts.append(Host(checked_name(words[0]), count))
        except ValueError as error:
            raise ValueError(f"{variable}={environ[variable]}, line {number}: {error}") from None
    if not hosts:
        raise ValueError(f"{variable}={environ[variable]}: it names no host")
    return merge_hosts(hosts)


def _read_mpi_hostfile(environ: Environ) -> list[Host]:
    variable = next((name for name in _HOSTFILE_VARIABLES if environ.get(name)), "")
    path = environ[variable] if variable else _OPERATOR_HOSTFILE
    try:
        lines = _lines(variable, path)
    except ValueError:
        if variable:
            raise
        return []
    try:
        return parse_hostfile(lines)
    except ValueError as error:
        raise ValueError(f"{f'{variable}=' if variable else ''}{path}: {error}") from None


def _lines(variable: str, path: str) -> list[str]:
    try:
        return read_lines(path)
    except OSError as error:
        raise ValueError(f"{variable}={path}: cannot read it: {error.strerror}") from None


def read_lines(path: str) -> list[str]:
    """Return the lines of a file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()


READERS = (
    Reader("LSF job", ["LSB_JOBID"], read_lsf, "ask LSF for more slots (bsub -n)"),
    Reader(
        "Slurm job",
        ["SLURM_JOB_ID", "SLURM_JOBID"],
        _read_slurm,
        "ask Slurm for more tasks (--ntasks, --ntasks-per-node)",
    ),
    Reader(
        "PBS job",
        ["PBS_NODEFILE"],
        _read_pbs,
        "ask PBS for more processes (-l select=N:mpiprocs=M, -l nodes=N:ppn=M)",
        job=["PBS_JOBID"],
    ),
    Reader(
        "SGE job", ["PE_HOSTFILE"], _read_sge, "ask SGE for more slots (qsub -pe)", job=["JOB_ID"]
    ),
    Reader("Cobalt job", ["COBALT_NODEFILE"], _read_cobalt, job=["COBALT_JOBID"]),
    Reader(
        "MPI hostfile",
        [],  # its variables, or the file alone
        _read_mpi_hostfile,
        "ask for more slots (slotsPerWorker, or more workers)",
        job=_HOSTFILE_VARIABLES,
    ),
)
