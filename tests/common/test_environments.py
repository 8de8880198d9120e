"""Every launcher's variables: one contract for all, then what is special to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common.environments import ENVIRONMENTS, Environment, RendezvousMethod, detect
from horovod.common.environments.base import Single, compute_cross
from horovod.common.environments.horovodrun import HorovodRun
from horovod.common.environments.mpi import MVAPICH2, Hydra, JSRun, OpenMPI, PMIx
from horovod.common.environments.slurm import Slurm, tasks_per_node
from horovod.common.environments.torchrun import Kubeflow, TorchRun
from horovod.common.topology import Topology

Environ = dict[str, str]


@dataclass(frozen=True)
class Place:
    """One process of a job whose hosts have ``counts`` ranks, numbered host by host."""

    counts: tuple[int, ...]
    host: int
    local_rank: int

    @property
    def topology(self) -> Topology:
        peers = [host for host, count in enumerate(self.counts) if count > self.local_rank]
        return Topology(
            rank=sum(self.counts[: self.host]) + self.local_rank,
            size=sum(self.counts),
            local_rank=self.local_rank,
            local_size=self.counts[self.host],
            cross_rank=peers.index(self.host),
            cross_size=len(peers),
        )


def places(counts: tuple[int, ...]) -> list[Place]:
    return [Place(counts, host, local) for host, n in enumerate(counts) for local in range(n)]


def horovodrun(place: Place) -> Environ:
    t = place.topology
    return {
        "HOROVOD_RANK": str(t.rank),
        "HOROVOD_SIZE": str(t.size),
        "HOROVOD_LOCAL_RANK": str(t.local_rank),
        "HOROVOD_LOCAL_SIZE": str(t.local_size),
        "HOROVOD_CROSS_RANK": str(t.cross_rank),
        "HOROVOD_CROSS_SIZE": str(t.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "192.0.2.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
        **torchrun(place),
    }


def torchrun(place: Place) -> Environ:
    t = place.topology
    return {
        "RANK": str(t.rank),
        "WORLD_SIZE": str(t.size),
        "LOCAL_RANK": str(t.local_rank),
        "LOCAL_WORLD_SIZE": str(t.local_size),
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "29500",
    }


def torchrun_agent(place: Place) -> Environ:
    return {
        **torchrun(place),
        "GROUP_RANK": str(place.host),
        "GROUP_WORLD_SIZE": str(len(place.counts)),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def kubeflow(place: Place) -> Environ:
    environ = torchrun(place)
    del environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]
    return environ


def open_mpi(place: Place) -> Environ:
    t = place.topology
    return {
        "OMPI_COMM_WORLD_RANK": str(t.rank),
        "OMPI_COMM_WORLD_SIZE": str(t.size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(t.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(t.local_size),
        "PMIX_RANK": str(t.rank),
        "PMIX_NAMESPACE": "prterun-host-42@1",
    }


def hydra(place: Place) -> Environ:
    t = place.topology
    return {
        "PMI_RANK": str(t.rank),
        "PMI_SIZE": str(t.size),
        "MPI_LOCALRANKID": str(t.local_rank),
        "MPI_LOCALNRANKS": str(t.local_size),
    }


def mvapich2(place: Place) -> Environ:
    t = place.topology
    return {
        "MV2_COMM_WORLD_RANK": str(t.rank),
        "MV2_COMM_WORLD_SIZE": str(t.size),
        "MV2_COMM_WORLD_LOCAL_RANK": str(t.local_rank),
        "MV2_COMM_WORLD_LOCAL_SIZE": str(t.local_size),
        "PMI_RANK": str(t.rank),
        "PMI_SIZE": str(t.size),
    }


def pmix(place: Place) -> Environ:
    t = place.topology
    return {
        "PMIX_RANK": str(t.rank),
        "PMIX_NAMESPACE": "prterun-host-42@1",
        "OMPI_WORLD_SIZE": str(t.size),
        "OMPI_WORLD_LOCAL_SIZE": str(t.local_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(t.local_rank),
    }


def jsrun(place: Place) -> Environ:
    t = place.topology
    return {
        "JSM_NAMESPACE_RANK": str(t.rank),
        "JSM_NAMESPACE_SIZE": str(t.size),
        "JSM_NAMESPACE_LOCAL_RANK": str(t.local_rank),
        "JSM_NAMESPACE_LOCAL_SIZE": str(t.local_size),
        "PMIX_RANK": str(t.rank),
        "PMIX_NAMESPACE": "1",
        "LSB_JOBID": "77",
    }


def slurm(place: Place) -> Environ:
    t = place.topology
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(t.rank),
        "SLURM_NTASKS": str(t.size),
        "SLURM_LOCALID": str(t.local_rank),
        "SLURM_NODEID": str(place.host),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, place.counts)),
    }


MAKERS: dict[type[Environment], Callable[[Place], Environ]] = {
    HorovodRun: horovodrun,
    TorchRun: torchrun,
    OpenMPI: open_mpi,
    Hydra: hydra,
    MVAPICH2: mvapich2,
    PMIx: pmix,
    JSRun: jsrun,
    Slurm: slurm,
    Kubeflow: kubeflow,
    Single: lambda place: {},
}
ONE_PER_HOST = {Kubeflow}
SEVERAL = [kind for kind in ENVIRONMENTS if kind is not Single]


@pytest.fixture(params=SEVERAL, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[Environment]:
    found: type[Environment] = request.param
    return found


def shape(kind: type[Environment], hosts: int, ranks: int) -> tuple[int, ...]:
    return (1 if kind in ONE_PER_HOST else ranks,) * hosts


def test_every_environment_is_under_the_contract() -> None:
    assert set(MAKERS) == set(ENVIRONMENTS)


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_contract_place(kind: type[Environment], hosts: int, ranks: int) -> None:
    for place in places(shape(kind, hosts, ranks)):
        found = detect(MAKERS[kind](place))
        assert type(found) is kind
        assert found.topology() == place.topology


def test_contract_name_meeting_and_job(kind: type[Environment]) -> None:
    first, second = places(shape(kind, 2, 1))
    environments = [detect(MAKERS[kind](place)) for place in (first, second)]
    assert len({environment.job_id() for environment in environments}) == 1
    assert environments[0].name
    assert environments[0].rendezvous is not RendezvousMethod.NOT_NEEDED


def test_contract_half_of_a_pair_is_an_error_naming_it(kind: type[Environment]) -> None:
    environ = MAKERS[kind](places(shape(kind, 2, 2))[1])
    names = kind.variables
    size = "OMPI_WORLD_SIZE" if kind is PMIx else names.size
    for missing in (names.rank, size):
        partial = {name: value for name, value in environ.items() if name != missing}
        for other in SEVERAL:  # what other launchers would make of the rest
            if other is not kind and other.detects(partial):
                for name in {other.variables.rank, other.variables.size} - {names.rank, size}:
                    partial.pop(name, None)
        if kind in (Slurm, PMIx) and missing == names.rank:
            assert type(detect(partial)) is Single
            continue
        with pytest.raises(ValueError, match=missing) as caught:
            detect(partial).topology()
        assert "HOROVOD_RANK" in str(caught.value), "says what to do"


@pytest.mark.parametrize("value", ["4", "-1", "1.5", "x"])
def test_contract_senseless_rank_is_an_error_with_its_value(
    kind: type[Environment], value: str
) -> None:
    environ = MAKERS[kind](places(shape(kind, 4 if kind in ONE_PER_HOST else 2, 2))[0])
    for name in (kind.variables.rank, "PMIX_RANK", "PMI_RANK"):
        if name in environ:
            environ[name] = value
    with pytest.raises(ValueError, match=f"{kind.variables.rank}={value}"):
        detect(environ).topology()


@pytest.mark.parametrize("kind", [kind for kind in SEVERAL if kind not in ONE_PER_HOST])
def test_contract_senseless_local_rank(kind: type[Environment]) -> None:
    environ = MAKERS[kind](places((2, 2))[0])
    environ[kind.variables.local_rank] = "2"
    with pytest.raises(ValueError, match=f"{kind.variables.local_rank}=2"):
        detect(environ).topology()


def test_contract_empty_variables_count_as_unset(kind: type[Environment]) -> None:
    environ = MAKERS[kind](places(shape(kind, 2, 2))[0])
    assert type(detect(dict.fromkeys(environ, ""))) is Single


def test_contract_explicit_variables_win(kind: type[Environment]) -> None:
    explicit = {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "6"}
    found = detect({**MAKERS[kind](places(shape(kind, 2, 2))[0]), **explicit})
    assert type(found) is HorovodRun
    assert (found.topology().rank, found.topology().size) == (5, 6)


def test_nothing_means_one_process() -> None:
    found = detect({"PATH": "/bin", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.1"})
    assert type(found) is Single
    assert found.topology() == Topology()
    assert found.rendezvous is RendezvousMethod.NOT_NEEDED


# HOROVOD_*


def test_horovodrun_without_local_variables() -> None:
    found = detect({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})
    assert found.topology() == Topology(1, 2, 0, 1, 1, 2)


def test_horovodrun_takes_cross_ranks_of_unequal_hosts() -> None:
    for place in places((3, 1, 2)):
        assert detect(horovodrun(place)).topology() == place.topology


@pytest.mark.parametrize(
    "name", ["HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"]
)
def test_horovodrun_needs_both_of_a_pair(name: str) -> None:
    environ = horovodrun(places((2, 2))[1])
    del environ[name]
    with pytest.raises(ValueError, match=f"{name} unset"):
        detect(environ).topology()
    with pytest.raises(ValueError, match="HOROVOD_RANK"):
        detect({name: "1"}).topology()


# torchrun and Kubeflow


def test_torchrun_agent_under_srun_or_mpirun_counts() -> None:
    place = places((2, 2))[3]
    agent = Place((1, 1), 1, 0)
    for outer in (slurm(agent), open_mpi(agent), hydra(agent)):
        found = detect({**outer, **torchrun_agent(place)})
        assert type(found) is TorchRun
        assert found.topology() == place.topology


def test_torchrun_variables_without_agent_beat_slurm() -> None:
    place = places((2, 2))[3]
    assert type(detect({**slurm(Place((1, 1), 1, 0)), **torchrun(place)})) is TorchRun


def test_torchrun_needs_the_local_size() -> None:
    environ = torchrun(places((2,))[0])
    del environ["LOCAL_WORLD_SIZE"]
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE unset"):
        detect(environ).topology()


def test_torchrun_jobs_differ_by_restart() -> None:
    environ = torchrun_agent(places((2,))[0])
    before = detect(environ).job_id()
    assert detect({**environ, "TORCHELASTIC_RESTART_COUNT": "1"}).job_id() != before


def test_exported_torch_variables_of_mpirun_or_srun_are_theirs() -> None:
    place = places((2, 2))[3]
    assert type(detect({**open_mpi(place), **torchrun(place)})) is OpenMPI
    assert type(detect({**slurm(place), **kubeflow(place)})) is Slurm


def test_left_over_half_of_torch_variables_is_ignored() -> None:
    assert type(detect({**open_mpi(places((2,))[0]), "WORLD_SIZE": "8"})) is OpenMPI
    assert type(detect({**slurm(places((2,))[0]), "RANK": "0"})) is Slurm


# MPI launchers


@pytest.mark.parametrize(
    ("one", "other"),
    [(open_mpi, torchrun), (open_mpi, hydra), (jsrun, open_mpi), (hydra, kubeflow)],
)
def test_contradicting_launchers_are_an_error_naming_both(
    one: Callable[[Place], Environ], other: Callable[[Place], Environ]
) -> None:
    environ = {**other(places((1, 1, 1))[2]), **one(places((1, 1))[1])}
    with pytest.raises(ValueError, match="contradict") as caught:
        detect(environ)
    assert "rank 1 of 2" in str(caught.value)
    assert "of 3" in str(caught.value)


def test_slurm_and_kubeflow_shaped_variables_must_agree() -> None:
    environ = {**slurm(places((2, 2))[3]), "RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match=r"SLURM_PROCID=3.*WORLD_SIZE=2"):
        detect(environ)


def test_agreeing_launchers_are_one() -> None:
    place = places((2, 2))[2]
    assert type(detect({**jsrun(place), **open_mpi(place)})) is JSRun
    assert type(detect({**open_mpi(place), **hydra(place)})) is OpenMPI


def test_mpirun_inside_slurm_is_mpi() -> None:
    place = places((2, 2))[3]
    proxies = slurm(Place((1, 1), 1, 0))
    for maker, kind in ((open_mpi, OpenMPI), (hydra, Hydra), (mvapich2, MVAPICH2), (pmix, PMIx)):
        found = detect({**proxies, **maker(place)})
        assert type(found) is kind
        assert found.topology() == place.topology


def test_srun_with_pmi_is_slurm() -> None:
    place = places((3, 1))[2]
    pmi2 = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "1234.0"}
    only_pmix = {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.1234.0"}
    for extra in (pmi2, only_pmix):
        found = detect({**slurm(place), **extra})
        assert type(found) is Slurm
        assert found.topology() == place.topology


def test_pmi_without_local_variables_says_so() -> None:
    with pytest.raises(ValueError, match="MPI_LOCALRANKID and MPI_LOCALNRANKS"):
        detect({"PMI_RANK": "0", "PMI_SIZE": "2"}).topology()


def test_pmi_with_pals_variables() -> None:
    environ = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
    assert detect(environ).topology() == Topology(3, 4, 1, 2, 1, 2)


def test_pmix_without_size_names_what_was_looked_for() -> None:
    with pytest.raises(ValueError, match=r"OMPI_WORLD_SIZE.*SLURM_NTASKS"):
        detect({"PMIX_RANK": "0", "PMIX_NAMESPACE": "n"}).topology()


def test_more_local_ranks_than_ranks() -> None:
    environ = {**open_mpi(places((2,))[0]), "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    with pytest.raises(ValueError, match=r"3 of 2 ranks.*OMPI_COMM_WORLD_LOCAL_SIZE=3"):
        detect(environ).topology()


# Slurm


def test_slurm_batch_script_and_interactive_shell_are_single() -> None:
    environ = slurm(places((2, 2))[0])
    del environ["SLURM_STEP_ID"]
    assert type(detect(environ)) is Single
    for step in ("4294967290", "4294967291", "batch"):
        assert type(detect({**environ, "SLURM_STEP_ID": step})) is Single


def test_slurm_step_is_smaller_than_its_job() -> None:
    environ = {
        **slurm(places((2, 1))[2]),
        "SLURM_NTASKS": "16",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_TASKS_PER_NODE": "8(x2)",
    }
    assert detect(environ).topology() == Topology(2, 3, 0, 1, 1, 2)


def test_slurm_lists_that_do_not_fit_are_an_error() -> None:
    environ = slurm(places((2, 2))[3])
    for changed in ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, {"SLURM_NODEID": "7"}):
        with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE=.*SLURM_NODEID="):
            detect({**environ, **changed}).topology()
    with pytest.raises(ValueError, match="tasks per node"):
        detect({**environ, "SLURM_STEP_TASKS_PER_NODE": "two"}).topology()


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), min_size=1, max_size=6))
def test_tasks_per_node(groups: list[tuple[int, int]]) -> None:
    text = ",".join(str(n) if repeat == 1 else f"{n}(x{repeat})" for n, repeat in groups)
    assert tasks_per_node(text) == [n for n, repeat in groups for _ in range(repeat)]


@given(st.text(alphabet="0123456789(x), -", max_size=15))
def test_tasks_per_node_of_any_text(text: str) -> None:
    try:
        counts = tasks_per_node(text)
    except ValueError:
        return
    assert counts
    assert all(count >= 0 for count in counts)


@pytest.mark.parametrize("text", ["", "4(x0)", "4(x999999999)", "4x2", "-4", "4,,3", "1" * 10])
def test_tasks_per_node_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        tasks_per_node(text)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_slurm_topology_of_unequal_hosts(counts: list[int], data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(places(tuple(counts))))
    assert detect(slurm(place)).topology() == place.topology


# Cross ranks


@given(st.integers(1, 20), st.integers(1, 20), st.data())
def test_computed_cross_of_equal_hosts(hosts: int, ranks: int, data: st.DataObject) -> None:
    host = data.draw(st.integers(0, hosts - 1))
    local = data.draw(st.integers(0, ranks - 1))
    size = hosts * ranks
    assert compute_cross(host * ranks + local, size, local, ranks) == (host, hosts)
    in_turn = compute_cross(local * hosts + host, size, local, ranks)
    if (local * hosts + host) % ranks != local:  # otherwise both numberings fit
        assert in_turn == (host, hosts)


@given(st.integers(1, 100), st.data())
def test_computed_cross_is_consistent_for_any_shape(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    local_size = data.draw(st.integers(1, size))
    local_rank = data.draw(st.integers(0, local_size - 1))
    cross_rank, cross_size = compute_cross(rank, size, local_rank, local_size)
    assert 0 <= cross_rank < cross_size
