"""What batch systems say about a job's hosts, from environments as they set them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.agents.starters import Srun
from horovod.runner.options.arguments import parse_args
from horovod.runner.slots import allocation
from horovod.runner.slots.allocation import Allocation, expand_nodelist, read_lsf
from horovod.runner.slots.hosts import Host

FILES = {
    "/var/spool/pbs/aux/77.head": ["c1", "c1", "c2", "c2", ""],
    "/var/spool/pbs/aux/78.head": ["c1", "c2"],
    "/sge/pe_hostfile": ["s1.q 4 all.q@s1.q UNDEFINED", "s2.q 2 all.q@s2.q <NULL>"],
    "/sge/broken": ["s1.q"],
    "/cobalt": ["x1", "x2"],
    "/etc/mpi/hostfile": ["w-0.w.ns.svc slots=2", "w-1.w.ns.svc slots=2"],
    "/intel": ["w-0.w.ns.svc:1", "w-1.w.ns.svc:1"],
    "/empty": ["", "# nobody"],
}


def reader(files: Mapping[str, Sequence[str]]) -> Callable[[str], Sequence[str]]:
    def read(path: str) -> Sequence[str]:
        if path not in files:
            raise FileNotFoundError(2, os.strerror(2), path)
        return files[path]

    return read


OTHERS = {path: lines for path, lines in FILES.items() if not path.startswith("/etc")}


def find(
    environ: Mapping[str, str], files: Mapping[str, Sequence[str]] = OTHERS
) -> Allocation | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation, "read_lines", reader(files))
        return allocation.find_allocation(environ)


def found(environ: Mapping[str, str], files: Mapping[str, Sequence[str]] = OTHERS) -> Allocation:
    answer = find(environ, files)
    assert answer is not None
    return answer


def slurm(nodelist: str = "n[1-2]", **variables: str | int) -> dict[str, str]:
    given = {f"SLURM_{name}": str(value) for name, value in variables.items()}
    return {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": nodelist, **given}


HETEROGENEOUS = {  # salloc -N1 -n1 : -N2 -n4
    "SLURM_JOB_ID": "9",
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS": "5",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_NTASKS_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "3,1",
    "SLURM_NTASKS_HET_GROUP_1": "4",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "3,1",
}


@pytest.mark.parametrize(
    ("environ", "text", "slots"),
    [
        # sbatch -N2 --ntasks-per-node=2, and -n 7 -N 4
        (
            slurm(NTASKS=4, NTASKS_PER_NODE=2, TASKS_PER_NODE="2(x2)", JOB_CPUS_PER_NODE="8(x2)"),
            "Slurm job 123: 2 nodes, 4 slots",
            {"n1": 2, "n2": 2},
        ),
        (
            slurm("n[1-3],m7", NTASKS=7, TASKS_PER_NODE="2(x3),1"),
            "Slurm job 123: 4 nodes, 7 slots",
            {"n1": 2, "n2": 2, "n3": 2, "m7": 1},
        ),
        # salloc -N2 -n4, as Slurm shares four tasks out by itself
        (
            slurm(NTASKS=4, TASKS_PER_NODE="3,1", JOB_CPUS_PER_NODE="3,1"),
            "Slurm job 123: 2 nodes, 4 slots",
            {"n1": 3, "n2": 1},
        ),
        # salloc -N2 --ntasks-per-node=1 on nodes that have more cores
        (
            slurm(NTASKS=2, NTASKS_PER_NODE=1, TASKS_PER_NODE="1(x2)", JOB_CPUS_PER_NODE="64(x2)"),
            "Slurm job 123: 2 nodes, 2 slots",
            {"n1": 1, "n2": 1},
        ),
        # salloc -N2: no tasks were asked for
        (
            slurm(TASKS_PER_NODE="4(x2)", JOB_CPUS_PER_NODE="4(x2)"),
            "Slurm job 123: 2 nodes, 8 slots",
            {"n1": 4, "n2": 4},
        ),
        (
            slurm(JOB_CPUS_PER_NODE="16,8", CPUS_PER_TASK=4),
            "Slurm job 123: 2 nodes, 6 slots",
            {"n1": 4, "n2": 2},
        ),
        (
            slurm(JOB_CPUS_PER_NODE="64(x2)", GPUS_PER_NODE="a100:4"),
            "Slurm job 123: 2 nodes, 8 slots",
            {"n1": 4, "n2": 4},
        ),
        # the interactive shell of salloc -N2 -n4 is a step of one task on one node
        (
            slurm(NTASKS=4, TASKS_PER_NODE="1", STEP_TASKS_PER_NODE="1", JOB_CPUS_PER_NODE="2(x2)"),
            "Slurm job 123: 2 nodes, 4 slots",
            {"n1": 2, "n2": 2},
        ),
        (
            slurm("n1", NTASKS=4, TASKS_PER_NODE="1", JOB_CPUS_PER_NODE="4"),
            "Slurm job 123: 1 node, 4 slots",
            {"n1": 4},
        ),
        # srun -n1 --pty bash in the job of two nodes
        (
            slurm(NTASKS=1, TASKS_PER_NODE="1", JOB_CPUS_PER_NODE="3(x2)"),
            "Slurm job 123: 2 nodes, 6 slots",
            {"n1": 3, "n2": 3},
        ),
        ({"SLURM_JOBID": "4", "SLURM_NODELIST": "n1"}, "Slurm job 4: 1 node", {"n1": None}),
        (HETEROGENEOUS, "Slurm job 9: 3 nodes, 5 slots", {"n1": 1, "n2": 3, "n3": 1}),
        (
            {"PBS_JOBID": "77.head", "PBS_NODEFILE": "/var/spool/pbs/aux/77.head"},
            "PBS job 77.head: 2 nodes, 4 slots",
            {"c1": 2, "c2": 2},
        ),
        (
            {"PBS_NODEFILE": "/var/spool/pbs/aux/77.head", "PBS_NUM_PPN": "2"},
            "PBS job: 2 nodes, 4 slots",
            {"c1": 2, "c2": 2},
        ),
        (
            {"PBS_NODEFILE": "/var/spool/pbs/aux/78.head", "PBS_NUM_PPN": "8"},
            "PBS job: 2 nodes, 16 slots",
            {"c1": 8, "c2": 8},
        ),
        (
            {"JOB_ID": "3", "PE_HOSTFILE": "/sge/pe_hostfile", "NSLOTS": "6"},
            "SGE job 3: 2 nodes, 6 slots",
            {"s1.q": 4, "s2.q": 2},
        ),
        (
            {"COBALT_JOBID": "8", "COBALT_NODEFILE": "/cobalt"},
            "Cobalt job 8: 2 nodes",
            {"x1": None, "x2": None},
        ),
        (
            {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 h1 4 h2 4 "},
            "LSF job 7: 3 nodes, 9 slots",
            {"batch1": 1, "h1": 4, "h2": 4},
        ),
        (
            {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 h1 4", "CSM_ALLOCATION_ID": "3"},
            "LSF job 7: 1 node, 4 slots",
            {"h1": 4},
        ),
        (
            {"I_MPI_HYDRA_HOST_FILE": "/intel"},
            "MPI hostfile /intel: 2 nodes, 2 slots",
            {"w-0.w.ns.svc": 1, "w-1.w.ns.svc": 1},
        ),
        (
            {"PRTE_MCA_prte_default_hostfile": "/cobalt"},
            "MPI hostfile /cobalt: 2 nodes",
            {"x1": None, "x2": None},
        ),
    ],
)
def test_recorded_environments(environ: dict[str, str], text: str, slots: dict[str, int | None]):
    allocation = found(environ)
    assert str(allocation) == text
    assert {host.name: host.slots for host in allocation.hosts} == slots


def test_the_hostfile_of_a_kubernetes_job_needs_no_variable():
    wanted = [Host("w-0.w.ns.svc", 2), Host("w-1.w.ns.svc", 2)]
    assert found({}, FILES).hosts == wanted
    by_variable = {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
    assert str(found(by_variable, FILES)) == "MPI hostfile /etc/mpi/hostfile: 2 nodes, 4 slots"
    assert found(slurm("n1"), FILES).hosts == [Host("n1")]  # the batch system comes first


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "5"},
        {"SLURM_JOB_NODELIST": "n1"},
        {"LSB_JOBID": "7"},
        {"LSB_MCPU_HOSTS": "h1 4"},
        {"PBS_NODEFILE": "", "PE_HOSTFILE": ""},
    ],
)
def test_no_allocation(environ: dict[str, str]):
    assert find(environ) is None


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        (slurm("n[1-"), r"^SLURM_JOB_NODELIST='n\[1-': 'n\[1-' is not a list of nodes"),
        (slurm("n[4-1]"), r"^SLURM_JOB_NODELIST='n\[4-1\]': the range '4-1' .* runs backwards"),
        (slurm("n[0-999999]"), "^SLURM_JOB_NODELIST=.* more than 100000 hosts"),
        (slurm(NTASKS=2, TASKS_PER_NODE="1x2"), "^SLURM_TASKS_PER_NODE: '1x2' is not a list"),
        (slurm(JOB_CPUS_PER_NODE="many"), "^SLURM_JOB_CPUS_PER_NODE: 'many' is not a list"),
        (slurm(HET_SIZE="two"), "^SLURM_HET_SIZE='two' is not a number"),
        ({"PBS_NODEFILE": "/gone"}, "^PBS_NODEFILE=/gone: cannot read it: No such file"),
        ({"PBS_NODEFILE": "/empty"}, "^PBS_NODEFILE=/empty, line 2: '#' is not of the form"),
        (
            {"PBS_NODEFILE": "/cobalt", "PBS_NUM_PPN": "x"},
            "^PBS_NUM_PPN='x': 'x' is not a number of slots",
        ),
        ({"PE_HOSTFILE": "/sge/broken"}, "^PE_HOSTFILE=/sge/broken, line 1: '' is not a number"),
        ({"HYDRA_HOST_FILE": "/empty"}, "^HYDRA_HOST_FILE=/empty: it names no host"),
        ({"HYDRA_HOST_FILE": "/gone"}, "^HYDRA_HOST_FILE=/gone: cannot read it: No such file"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4 h2"}, "^LSB_MCPU_HOSTS='h1 4 h2' is not pairs"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 x"}, "^LSB_MCPU_HOSTS='h1 x': 'x' is not a num"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_text(environ: dict[str, str], why: str):
    with pytest.raises(ValueError, match=why):
        find(environ)


def test_lsf_for_programs_that_ask_it_alone():
    assert read_lsf({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4"}) == [Host("h1", 4)]
    assert read_lsf({"LSB_MCPU_HOSTS": "h1 4"}) == []


def test_srun_is_told_the_group_of_a_node_of_a_heterogeneous_job():
    def groups(host: str, environ: dict[str, str]) -> list[str]:
        command = Srun({**environ, "PATH": ""}).command(host, ["true"])
        return [word for word in command if word.startswith("--het-group")]

    assert groups("n1", HETEROGENEOUS) == ["--het-group=0"]
    assert groups("n3", HETEROGENEOUS) == ["--het-group=1"]
    assert groups("n9", HETEROGENEOUS) == []
    assert groups("n1", slurm()) == []


# -- node lists --------------------------------------------------------------------------------

ranges = st.tuples(st.integers(0, 120), st.integers(0, 3), st.integers(0, 3))  # low, more, width
items = st.tuples(
    st.from_regex(r"[a-z]{1,3}[0-9]?-?", fullmatch=True),
    st.lists(
        st.tuples(
            st.lists(ranges, min_size=1, max_size=3), st.from_regex(r"[a-z]?", fullmatch=True)
        ),
        max_size=3,
    ),
)


def written(brackets: Sequence[tuple[int, int, int]]) -> str:
    return ",".join(
        f"{low:0{width}d}-{low + more}" if more else f"{low:0{width}d}"
        for low, more, width in brackets
    )


def reference(prefix: str, brackets: Sequence[tuple[list[tuple[int, int, int]], str]]) -> list[str]:
    """Like Slurm: a recursion over all brackets but the last, of which the first is the fastest."""
    numbers = [
        [f"{low + n:0{width}d}" for low, more, width in group for n in range(more + 1)]
        for group, _ in brackets
    ]
    names = []
    for indices in itertools.product(
        *(range(len(each)) for each in [*numbers[-2::-1], *numbers[-1:]])
    ):
        order = [*indices[-2::-1], *indices[-1:]]
        name = prefix
        for group, (_, text), index in zip(numbers, brackets, order, strict=True):
            name += group[index] + text
        names.append(name)
    return names


@given(st.lists(items, min_size=1, max_size=3))
def test_node_lists(parts):
    text = ",".join(
        prefix + "".join(f"[{written(group)}]{after}" for group, after in brackets)
        for prefix, brackets in parts
    )
    wanted = [name for prefix, brackets in parts for name in reference(prefix, brackets)]
    assert expand_nodelist(text) == wanted


@given(st.text(alphabet="nx019-,[] ", max_size=16))
def test_any_text_is_names_or_a_value_error(text: str):
    try:
        names = expand_nodelist(text)
    except ValueError:
        return
    assert names
    assert all(not set(name) & set("[], ") and not name.startswith("-") for name in names)


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="there is no Slurm here")
@pytest.mark.parametrize(
    "text",
    [
        "n[1-3,07-09]x[1-2]",
        "a,b[01-03],c-[9-11,5]",
        "a[1-2]b[3-4]c[5-6]",
        "a[1-2]b[1-2]c[1-2]d[1-2]",
        "n[007-12],n[1-03],n[3,1,2]",
    ],
)
def test_node_lists_are_those_of_slurm(tmp_path: Path, text: str):
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(configuration)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expand_nodelist(text) == done.stdout.split()


# -- horovodrun --------------------------------------------------------------------------------


def test_an_allocation_is_used_where_no_option_names_hosts(tmp_path: Path):
    environ = slurm(NTASKS=4, TASKS_PER_NODE="2(x2)")
    options = parse_args(["cmd"], environ)
    assert (options.num_proc, options.hosts) == (4, [Host("n1", 2), Host("n2", 2)])
    assert options.allocation.describe(4) == ["Slurm job 123: 2 nodes, 4 slots"]
    few = parse_args(["-np", "2", "cmd"], environ)
    assert few.num_proc == 2
    assert few.allocation.describe(2)[1].startswith("1 of 2 nodes stays unused: -np 2 fills one")
    named = parse_args(["-np", "2", "-H", "x:2", "cmd"], environ)
    assert (named.hosts, named.allocation) == ([Host("x", 2)], None)
    (tmp_path / "hosts").write_text("y slots=3")
    from_file = parse_args(["-np", "2", "--hostfile", str(tmp_path / "hosts"), "cmd"], environ)
    assert (from_file.hosts, from_file.allocation) == ([Host("y", 3)], None)


def test_too_many_processes_for_an_allocation(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse_args(["-np", "6", "cmd"], slurm(NTASKS=4, TASKS_PER_NODE="2(x2)"))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Slurm job 123: 2 nodes, 4 slots, but 6 processes are to run; ask Slurm" in said
    assert "-H n1:3,n2:3" in said


def test_nodes_without_a_number_of_slots_need_one(capsys: pytest.CaptureFixture[str]):
    environ = {"SLURM_JOBID": "4", "SLURM_NODELIST": "n[1-2]"}
    with pytest.raises(SystemExit):
        parse_args(["cmd"], environ)
    assert "Slurm job 4: 2 nodes, and no number of slots; say how many" in capsys.readouterr().err
    assert parse_args(["-np", "6", "cmd"], environ).allocation.describe(6) == [
        "Slurm job 4: 2 nodes"
    ]
