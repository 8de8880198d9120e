"""What workers get: this machine under two names is one machine, another host is another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from horovod.runner.agents import agent_set
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.starters import Ssh
from horovod.runner.jobs.request import (
    JobRequest,
    describe_threads,
    neighbours,
    worker_specs,
)
from horovod.runner.slots.hosts import parse_hosts, plan_slots
from horovod.runner.slots.worker_env import KEY, WorkerRendezvous

REQUEST = JobRequest(
    command=["python"],
    slots=plan_slots(parse_hosts("localhost:2,127.0.0.1:1,elsewhere:2"), 5),
    env={"GIVEN": "yes", "HOSTNAME": "here"},
    cwd="/",
    starter=Ssh(None, None, 1.0),
)
MEETING = WorkerRendezvous("10.0.0.1", 1234, b"k" * 32)


def host_variables(request: JobRequest, agent: HostAgent, nics: Sequence[str]) -> dict[str, str]:
    workers = len(neighbours(request, agent.name))
    return agent_set.host_variables(request, agent, MEETING, nics, workers)


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, HostAgent]]:
    """Agents of this machine; the last stands for one on another host, with other cores."""
    found = {name: HostAgent(name) for name in REQUEST.hosts}
    for name, agent in found.items():
        elsewhere = name == "elsewhere"
        agent.hello = {
            "cores": 32 if elsewhere else 12,
            "machine": "aarch64" if elsewhere else "x86_64",
        }
    found["elsewhere"].link.remote = True
    yield found
    found["elsewhere"].link.remote = False
    for agent in found.values():
        agent.link.release()
        agent.link.wait()


def test_cores_are_shared_by_machine(agents: dict[str, HostAgent]):
    bound = replace(REQUEST, cpu_bind="core")
    specs = {name: worker_specs(bound, agent) for name, agent in agents.items()}
    assert {name: [spec.bind for spec in found] for name, found in specs.items()} == {
        "localhost": [("core", 0, 3), ("core", 1, 3)],
        "127.0.0.1": [("core", 2, 3)],
        "elsewhere": [("core", 0, 2), ("core", 1, 2)],
    }
    assert [spec.bind for spec in worker_specs(REQUEST, agents["localhost"])] == [None, None]


def test_one_worker_gets_the_input(agents: dict[str, HostAgent]):
    attached = replace(REQUEST, attach=2)
    takers = [s.id for a in agents.values() for s in worker_specs(attached, a) if s.input]
    assert takers == [2]


def test_torch_keeps_memory_where_it_has_an_allocator_of_its_own(agents: dict[str, HostAgent]):
    def found(name: str, **env: str) -> str | None:
        request = replace(REQUEST, env={**REQUEST.env, **env})
        return host_variables(request, agents[name], []).get("MIMALLOC_PURGE_DELAY")

    assert found("elsewhere") == "-1"
    assert found("localhost") is None
    assert found("elsewhere", HOROVOD_KEEP_HEAP="0") is None
    assert found("elsewhere", MIMALLOC_PURGE_DELAY="50") == "50"
    assert found("elsewhere", mimalloc_allow_purge="0") is None


def test_threads_are_shared_by_machine(agents: dict[str, HostAgent]):
    threads = {
        name: host_variables(REQUEST, agent, [])["OMP_NUM_THREADS"]
        for name, agent in agents.items()
    }
    assert threads == {"localhost": "4", "127.0.0.1": "4", "elsewhere": "16"}
    assert describe_threads(REQUEST, agents.values()) == []  # nothing that people must know
    first, second = describe_threads(replace(REQUEST, verbose=1), agents.values())
    assert first.startswith("OMP_NUM_THREADS=4 for each worker on localhost, 127.0.0.1 (12 cores,")
    assert second.startswith("OMP_NUM_THREADS=16 for each worker on elsewhere (32 cores, 2 workers")


def test_ranks_that_share_cores_are_told(agents: dict[str, HostAgent]):
    crowded = replace(REQUEST, slots=plan_slots(parse_hosts("localhost:13"), 13))
    (sentence,) = describe_threads(crowded, [agents["localhost"]])
    assert sentence == (
        "13 ranks share 12 cores, with OMP_NUM_THREADS=1 for each. "
        "Start one rank for each core or GPU (-np), or take more hosts (-H)."
    )
    (sentence,) = describe_threads(
        replace(crowded, env={"OMP_NUM_THREADS": "7"}), [agents["localhost"]]
    )
    assert "with OMP_NUM_THREADS=7 for each" in sentence


def test_threads_that_the_user_chose_stay(agents: dict[str, HostAgent]):
    chosen = replace(REQUEST, env={"OMP_NUM_THREADS": "7"})
    env = host_variables(chosen, agents["localhost"], [])
    assert env["OMP_NUM_THREADS"] == "7"
    assert describe_threads(chosen, agents.values()) == []


def test_variables_of_this_machine_stay_here(agents: dict[str, HostAgent]):
    here = host_variables(REQUEST, agents["localhost"], ["eth1"])
    there = host_variables(REQUEST, agents["elsewhere"], ["eth1"])
    assert (here["HOSTNAME"], here["GIVEN"], here["HOROVOD_GLOO_IFACE"]) == ("here", "yes", "eth1")
    assert "HOSTNAME" not in there
    assert here[KEY] == there[KEY]
    assert (there["GIVEN"], there["HOROVOD_GLOO_RENDEZVOUS_ADDR"]) == ("yes", "10.0.0.1")


def test_a_host_that_has_the_key_gets_none(agents: dict[str, HostAgent]):
    link = agents["elsewhere"].link
    kept, link.own_variables = link.own_variables, None
    env = host_variables(REQUEST, agents["elsewhere"], [])
    link.own_variables = kept
    assert KEY not in env
    assert "OMP_NUM_THREADS" not in env
