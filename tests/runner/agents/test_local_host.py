"""Each worker's share of a host's cores."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.agents.local_host import numa_nodes, parse_cores, share_of_cores, usable_cores

ALLOWED = st.sets(st.integers(0, 255), min_size=1)


@given(allowed=ALLOWED, count=st.integers(1, 64))
def test_cores_are_split_evenly(allowed: set[int], count: int):
    shares = [share_of_cores(allowed, "core", index, count, []) for index in range(count)]
    assert all(share and share <= allowed for share in shares)
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1
    if count <= len(allowed):
        assert set().union(*shares) == allowed
        assert sum(map(len, shares)) == len(allowed)


@given(allowed=ALLOWED, count=st.integers(1, 64))
def test_a_worker_gets_one_numa_node(allowed: set[int], count: int):
    nodes = [set(range(64)), set(range(64, 128)), set(range(128, 256))]
    usable = [node & allowed for node in nodes if node & allowed]
    shares = [share_of_cores(allowed, "numa", index, count, nodes) for index in range(count)]
    assert all(share in usable for share in shares)
    if count >= len(usable):
        assert all(node in shares for node in usable)


def test_without_nodes_a_worker_may_use_everything():
    assert share_of_cores({1, 2}, "numa", 1, 3, []) == {1, 2}


def test_nodes_as_the_system_tells_them(tmp_path: Path):
    for name, cores in (("node10", "8"), ("node2", "0-3,6\n"), ("possible", "0-9"), ("node", "5")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    assert numa_nodes(str(tmp_path)) == [{0, 1, 2, 3, 6}, {8}]
    assert numa_nodes(str(tmp_path / "missing")) == []


def test_lists_of_cores():
    assert parse_cores("") == set()
    assert parse_cores("0-2,5,7-7\n") == {0, 1, 2, 5, 7}


def test_the_quota_of_a_cgroup_counts(tmp_path: Path):
    """That of a container or of a Slurm job, which may be on any of the groups around a process."""
    process = tmp_path / "process"
    process.write_text("1:name=x:/y\n0::/job/step\n")
    where = str(tmp_path), str(process)
    free = usable_cores(*where)
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "step" / "cpu.max").write_text("max 100000\n")
    assert usable_cores(*where) == free
    (tmp_path / "job" / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(*where) == 1
    (tmp_path / "job" / "cpu.max").write_text("nonsense\n")
    assert usable_cores(*where) == free
