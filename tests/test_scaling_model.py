"""The cost model behind benchmarks/scaling_model.py, and that the program runs."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scaling_costs import (
    FEW,
    LOOPBACK,
    SMALL,
    Cost,
    Group,
    Layout,
    Link,
    Machine,
    agreement,
    allreduce,
    bytes_leaving,
    circulant,
    crossing,
    flat,
    gathered,
    hierarchical,
    scattered,
)
from benchmarks.scaling_limits import job_parts, step_parts
from benchmarks.scaling_measure import environments
from benchmarks.scaling_report import Check, checks_table, efficiencies, efficiency_table
from benchmarks.scaling_steps import (
    MIB,
    NETWORKS,
    WAYS,
    Piece,
    Setting,
    after_backward,
    beside_forward,
    cut,
    efficiency,
    step,
)
from tests.forked_python import forked_python

ROOT = Path(__file__).resolve().parent.parent
US, NS = 1e-6, 1e-9
MACHINE = Machine(
    call=20 * US,
    message=18 * US,
    wake=2 * US,
    send_byte=0.15 * NS,
    receive_byte=0.15 * NS,
    add_byte=0.1 * NS,
    copy_byte=0.06 * NS,
    shared_byte=0.3 * NS,
    store_request=130 * US,
    store_byte=2 * NS,
    cores=2,
)
CLUSTER = Link.of(25, 20)

sizes = st.integers(1, 3000)
numbers_of_bytes = st.integers(4, 1 << 30)
layouts = st.builds(Layout, st.integers(1, 200), st.integers(1, 16))
tensors = st.lists(
    st.builds(Piece, st.floats(4, 5e8), st.floats(1e-5, 0.1), st.floats(1e-5, 0.2)),
    min_size=1,
    max_size=30,
)


# -- algorithms --------------------------------------------------------------------------------


@given(sizes)
def test_a_circulant_graph_needs_logarithmically_many_rounds(size: int):
    assert len(circulant(size)) == math.ceil(math.log2(size))


@given(sizes)
def test_a_circulant_graph_sends_no_block_twice(size: int):
    assert sum(each.blocks for each in circulant(size)) == size - 1
    assert all(0 < each.blocks <= each.distance for each in circulant(size))


@settings(deadline=None)
@given(st.integers(1, 100))
def test_an_allgather_by_these_rounds_reaches_everybody(size: int):
    held = [{rank} for rank in range(size)]
    for each in reversed(circulant(size)):
        sent = [{(rank + offset) % size for offset in range(each.blocks)} for rank in range(size)]
        assert all(blocks <= held[rank] for rank, blocks in enumerate(sent))
        held = [held[rank] | sent[(rank + each.distance) % size] for rank in range(size)]
    assert all(blocks == set(range(size)) for blocks in held)


@given(layouts, st.data())
def test_crossing_counts_the_ranks_that_send_to_another_host(layout: Layout, data: st.DataObject):
    distance = data.draw(st.integers(0, layout.size - 1))
    host = layout.per_host * data.draw(st.integers(0, layout.hosts - 1))
    leaving = [
        rank
        for rank in range(host, host + layout.per_host)
        if not host <= (rank + distance) % layout.size < host + layout.per_host
    ]
    assert crossing(distance, Group.flat(layout)) == len(leaving)


@given(numbers_of_bytes, sizes)
def test_every_rank_sends_as_few_bytes_as_can_be(nbytes: int, size: int):
    """One rank a host: what leaves the host is what the rank sends."""
    assert bytes_leaving(nbytes, Group(size)) == pytest.approx(2 * nbytes * (size - 1) / size)


@given(numbers_of_bytes, layouts)
def test_lanes_take_no_more_bytes_between_hosts_than_flat(nbytes: int, layout: Layout):
    lanes = Group(layout.hosts, lanes=layout.per_host)
    through_lanes = bytes_leaving(nbytes / layout.per_host, lanes)
    assert through_lanes <= bytes_leaving(nbytes, Group.flat(layout)) * (1 + 1e-9)
    assert through_lanes == pytest.approx(2 * nbytes * (layout.hosts - 1) / layout.hosts)


# -- costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [flat, hierarchical])
@given(nbytes=numbers_of_bytes, layout=layouts)
def test_no_part_of_a_cost_is_negative(way, nbytes: int, layout: Layout):
    cost = way(nbytes, layout, CLUSTER, MACHINE)
    assert min(dataclasses.astuple(cost)) >= 0
    assert (cost.seconds() == 0) == (layout.size == 1)


@given(numbers_of_bytes, st.integers(FEW + 1, 1000))
def test_more_ranks_take_no_less_time(nbytes: int, size: int):
    for way in (gathered, scattered):
        fewer, more = (way(nbytes, Group(p), CLUSTER, MACHINE) for p in (size, size + 1))
        assert more.seconds() >= fewer.seconds() * (1 - 1e-9)
    asked = [agreement(Layout(p, 8), CLUSTER, MACHINE, True).seconds() for p in (size, 2 * size)]
    assert asked[0] < asked[1]


@given(st.integers(2, 512), st.integers(2, 16), st.integers(SMALL, 1 << 30))
def test_hosts_that_share_memory_keep_the_link_free(hosts: int, per_host: int, nbytes: int):
    layout = Layout(hosts, per_host)
    ways = [way(nbytes, layout, CLUSTER, MACHINE) for way in (hierarchical, flat)]
    assert ways[0].wire <= ways[1].wire * (1 + 1e-9)


def test_pieces_hide_shared_memory_behind_the_link():
    layout, nbytes = Layout(16, 8), 64 * MIB
    cost = hierarchical(nbytes, layout, Link.of(1, 20), MACHINE)
    assert cost.wire < cost.seconds() < 1.05 * cost.wire


@given(st.floats(1, 64), st.builds(Cost, *[st.floats(0, 10)] * 4))
def test_crowded_cores_do_all_the_work(crowding: float, cost: Cost):
    assert cost.seconds(crowding) >= crowding * cost.work
    assert cost.seconds(crowding) >= cost.seconds() >= max(cost.wire, cost.work)


def test_a_small_tensor_travels_with_its_agreement():
    layout = Layout(8, 1)
    tiny = allreduce(4, layout, LOOPBACK, MACHINE, by_host=False)
    asked = agreement(layout, LOOPBACK, MACHINE, by_host=False)
    assert tiny.serial == pytest.approx(MACHINE.call + asked.serial)
    assert tiny.serial == pytest.approx(MACHINE.call + 3 * MACHINE.message)
    large = allreduce(MIB, layout, LOOPBACK, MACHINE, by_host=False)
    assert large.serial == pytest.approx(tiny.serial + 14 * MACHINE.message)


# -- steps -------------------------------------------------------------------------------------


@given(tensors, st.floats(1, 1e9))
def test_buckets_hold_every_byte_once_and_in_order(pieces: Sequence[Piece], most: float):
    buckets = cut(pieces, most)
    assert sum(b.nbytes for b in buckets) == pytest.approx(sum(p.nbytes for p in pieces))
    assert [b.piece for b in buckets] == sorted({b.piece for b in buckets}, reverse=True)
    assert [b.ready for b in buckets] == sorted(b.ready for b in buckets)
    assert buckets[-1].piece == 0
    assert buckets[-1].ready == pytest.approx(sum(p.backward for p in pieces))
    ends = [len(pieces), *(b.piece for b in buckets)]
    for before, bucket in zip(ends, buckets, strict=False):
        assert bucket.nbytes <= most or bucket.piece == before - 1


@settings(deadline=None)
@given(tensors, st.floats(1e6, 1e8), layouts, st.sampled_from(WAYS))
def test_a_step_is_no_shorter_than_what_it_cannot_hide(
    pieces: Sequence[Piece], most: float, layout: Layout, way: str
):
    setting = Setting(layout, CLUSTER, MACHINE, most)
    costs = [setting.reduction(way)(bucket) for bucket in cut(pieces, most)]
    found = step(pieces, setting, way)
    compute = sum(piece.forward + piece.backward for piece in pieces)
    assert found >= compute * (1 - 1e-9)
    assert found >= sum(cost.wire for cost in costs) * (1 - 1e-9)
    assert found <= (compute + sum(cost.seconds() for cost in costs)) * (1 + 1e-9)


@settings(deadline=None)
@given(tensors, st.floats(1e6, 1e8), st.floats(1e-12, 1e-8))
def test_going_on_beside_forward_never_loses(pieces: Sequence[Piece], most: float, per_byte: float):
    buckets = cut(pieces, most)
    taken = [bucket.nbytes * per_byte for bucket in buckets]
    hidden = beside_forward(pieces, buckets, taken)
    assert hidden <= after_backward(pieces, buckets, taken) * (1 + 1e-9)


def test_the_next_forward_hides_what_backward_could_not():
    pieces = [Piece(MIB, 1.0, 2.0) for _ in range(10)]
    buckets = cut(pieces, MIB)
    assert after_backward(pieces, buckets, [2.4] * 10) == pytest.approx(10 + 2 + 24)
    # The input's bucket is complete at 30 and begun at 31.2: what is under way is finished first.
    assert beside_forward(pieces, buckets, [2.4] * 10) == pytest.approx(30 + 1.2 + 2.4)
    assert beside_forward(pieces, buckets, [0.1] * 10) == pytest.approx(30.1)
    assert after_backward(pieces, buckets, [0.1] * 10) == pytest.approx(30.1)


def test_training_on_the_cores_that_communicate_adds_up():
    pieces = [Piece(MIB, 0.01, 0.02) for _ in range(4)]
    apart = Setting(Layout(2, 1), LOOPBACK, MACHINE, MIB)
    together = dataclasses.replace(apart, on_cores=True)
    work = sum(apart.reduction("flat")(bucket).work for bucket in cut(pieces, MIB))
    assert step(pieces, apart, "flat") < 0.12 + work
    assert step(pieces, together, "flat") == pytest.approx(0.12 + work)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_as_large_as_published(name: str):
    megabytes = {"resnet101": 178, "inception3": 95, "vgg16": 553}[name]
    network = NETWORKS[name]
    assert sum(p.nbytes for p in network.pieces()) == pytest.approx(megabytes * 1e6, rel=0.01)
    compute = sum(p.forward + p.backward for p in network.pieces())
    assert compute == pytest.approx(network.compute)


def test_one_rank_is_its_own_measure():
    for network in NETWORKS.values():
        for way in WAYS:
            alone = Setting(Layout(1, 1), CLUSTER, MACHINE)
            assert efficiency(network, alone, way) == pytest.approx(1.0)


def test_a_faster_link_is_no_worse():
    for way in WAYS:
        found = [
            efficiency(NETWORKS["vgg16"], Setting(Layout(64, 8), Link.of(g, 20), MACHINE), way)
            for g in (1, 10, 25, 100, 400)
        ]
        assert found == sorted(found)


# -- limits and reports ------------------------------------------------------------------------


def test_what_grows_with_ranks_is_named():
    setting = Setting(Layout(128, 8), CLUSTER, MACHINE)
    network = NETWORKS["resnet101"]
    growing = {part.title: part.verdict for part in step_parts(network, setting, "flat")}
    assert growing["agreements: bytes of all ranks"] == "grows with ranks"
    assert growing["agreements: latency and messages"] == ""
    assert growing["gradients: the link is full"] == ""
    parts = job_parts(network, setting)
    assert [part.seconds for part in parts] == sorted((p.seconds for p in parts), reverse=True)
    assert any("SQUARE" in part.verdict for part in parts)


def test_errors_are_relative_to_what_was_measured():
    check = Check("allreduce of 4 B", "flat", 2, 4, predicted=1.0, measured=2.0)
    assert check.error == -0.5
    assert "-50 %" in checks_table([check])


def test_the_table_has_the_study_beside_it():
    found = efficiencies(MACHINE, [CLUSTER], [Layout(1, 8), Layout(128, 8)], 8 * MIB)
    lines = efficiency_table(found, CLUSTER).splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["8", "1024", "512"]
    assert lines[-1].split()[-6:] == ["90", "%", "90", "%", "68", "%"]


def test_ranks_believe_to_be_on_several_hosts():
    found = environments(Layout(2, 2), {"HOROVOD_CPU_OPERATIONS": "gloo"})
    assert [e["HOROVOD_HOSTNAME"] for e in found] == ["host0", "host0", "host1", "host1"]
    assert [e["LOCAL_RANK"] for e in found] == ["0", "1", "0", "1"]
    assert {e["LOCAL_WORLD_SIZE"] for e in found} == {"2"}


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [*forked_python(), str(ROOT / "benchmarks" / "scaling_model.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=600)


def test_the_model_predicts_from_given_constants(tmp_path: Path):
    constants = tmp_path / "machine.json"
    constants.write_text(json.dumps(dataclasses.asdict(MACHINE)))
    given = ["--only-model", "--machine", str(constants), "--output", str(tmp_path)]
    found = run_program(*given, "--gbit", "10", "--hosts", "4")
    assert found.returncode == 0, found.stderr
    assert "Efficiency, 10 Gbit/s, 20 us" in found.stdout
    assert "recommended by horovodrun --plan" in found.stdout
    assert "GROWS WITH THE SQUARE OF RANKS" in found.stdout
    with (tmp_path / "scaling.csv").open() as file:
        sections = {row["section"] for row in csv.DictReader(file)}
    assert sections == {"constant", "efficiency", "part"}


def test_measurements_are_compared_with_predictions(tmp_path: Path):
    given = ["--np", "2", "--sizes", "4,64K", "--models", "mlp", "--seconds", "0.2"]
    found = run_program(*given, "--output", str(tmp_path))
    assert found.returncode == 0, found.stderr
    with (tmp_path / "scaling.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["section"] in ("constant", "check")]
    assert all(float(row["measured"]) >= 0 for row in rows)
    checks = [row for row in rows if row["section"] == "check"]
    assert [(row["way"], row["ranks"]) for row in checks] == [
        ("flat", "2"),
        ("flat", "2"),
        ("flat", "2"),
        ("hierarchical", "4"),
    ]
    assert all(float(row["predicted"]) > 0 for row in checks)


@pytest.mark.parametrize("wrong", [["--np", "1"], ["--gbit", "0"], ["--hosts", "0"]])
def test_wrong_arguments_are_named(wrong: list[str]):
    found = run_program(*wrong)
    assert found.returncode == 2
    assert wrong[0] in found.stderr
