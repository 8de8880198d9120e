"""What the workers of one host get in a job with fixed ranks: variables, threads and cores.

`static_job` asks for it when an agent is ready to start them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horovod.runner.agents.host_agent import HostAgent, WorkerSpec
from horovod.runner.jobs.request import JobRequest
from horovod.runner.slots.hosts import Slot, is_local
from horovod.runner.slots.worker_env import (
    CROWDED_ADVICE,
    KEY,
    WorkerRendezvous,
    common_variables,
    interface_variables,
    memory_variables,
    slot_variables,
    threads_per_worker,
    travelling,
)


def worker_specs(request: JobRequest, agent: HostAgent) -> list[WorkerSpec]:
    """The workers that an agent is to start."""
    neighbours = _neighbours(request, agent.name)
    return [
        WorkerSpec(
            slot.rank,
            request.command,
            slot_variables(slot),
            request.cwd,
            None
            if request.cpu_bind == "none"
            else (request.cpu_bind, neighbours.index(slot), len(neighbours)),
            slot.rank == request.attach,
        )
        for slot in request.hosts[agent.name]
    ]


def host_variables(
    request: JobRequest, agent: HostAgent, meeting: WorkerRendezvous, nics: Sequence[str]
) -> dict[str, str]:
    """The variables that are the same for all workers of a host."""
    env = travelling(request.env, agent.link.keeps) if agent.remote else dict(request.env)
    if agent.link.keeps is not None:
        if not request.env.get("OMP_NUM_THREADS"):
            env["OMP_NUM_THREADS"] = str(_threads(request, agent))
        env |= memory_variables((agent.hello or {})["machine"], env)
    env |= interface_variables(nics) | common_variables(meeting)
    if agent.link.keeps is None:
        del env[KEY]
    return env


def describe_threads(request: JobRequest, agents: Iterable[HostAgent]) -> list[str]:
    """Say how many threads workers get, in one sentence for hosts that are alike.

    Without --verbose only where there are more workers than cores, which makes them slow.
    """
    chosen = request.env.get("OMP_NUM_THREADS")
    alike: dict[tuple[int, int, int], list[str]] = {}
    for agent in agents:
        if agent.link.keeps is None:
            continue  # who gave the host has said how many threads
        facts = (_threads(request, agent), _cores(agent), len(_neighbours(request, agent.name)))
        alike.setdefault(facts, []).append(agent.name)
    sentences = []
    for (threads, cores, workers), names in alike.items():
        where = "" if len(alike) == 1 else f" on {', '.join(names)}"
        if workers > cores:
            many = "1 core" if cores == 1 else f"{cores} cores"
            each = f", with OMP_NUM_THREADS={chosen or threads} for each"
            sentences.append(f"{workers} ranks share {many}{where}{each}. {CROWDED_ADVICE}")
        elif request.verbose and not chosen:
            plural = "" if workers == 1 else "s"
            sentences.append(
                f"OMP_NUM_THREADS={threads} for each worker{where} ({cores} cores, {workers} "
                f"worker{plural}); set it yourself to choose otherwise"
            )
    return sentences


def _threads(request: JobRequest, agent: HostAgent) -> int:
    return threads_per_worker(_cores(agent), len(_neighbours(request, agent.name)))


def _cores(agent: HostAgent) -> int:
    return int((agent.hello or {})["cores"])


def _neighbours(request: JobRequest, name: str) -> list[Slot]:
    """The slots of a host's machine: this one may be in the list under several names."""
    if not is_local(name):
        return request.hosts[name]
    return [slot for slot in request.slots if is_local(slot.hostname)]
