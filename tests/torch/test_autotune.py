"""HOROVOD_AUTOTUNE: ranks tune together, results stay right, and what is chosen is the fastest."""

from __future__ import annotations

import contextlib
import csv
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.engine.runtime import runtime
from horovod.torch.gradients import autotune
from horovod.torch.gradients.agreement import TUNABLE, Agreement
from tests.accelerators import accelerator as find_accelerator
from tests.elastic.job import ElasticJob
from tests.elastic.training import Plan, expected
from tests.elastic.training import train as train_elastic
from tests.ranks import RankPool, run_ranks
from tests.torch.training import make_model, weights_of

ON = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
}
MOST_STEPS = 150  # 3 for each sample: before it begins, a warm-up, up to 20, and 10 comparisons
UPSTREAM = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score"
)


@pytest.fixture(scope="module")
def tuning2() -> Iterator[RankPool]:
    """Two ranks that tune; the algorithm of all is found by whichever test is first."""
    pool = RankPool(2, env=ON)
    yield pool
    pool.close()


def _spare_cores(any_left: bool) -> Any:
    """As on a machine where they are, or are not; without them nobody tries to overlap unasked."""
    return mock.patch(
        "horovod.torch.gradients.agreement.has_spare_core", mock.Mock(return_value=any_left)
    )


@contextlib.contextmanager
def _choice() -> Iterator[None]:
    """Buckets of several sizes to choose from, for a tiny model and whatever cores there are."""
    sizes = mock.patch("horovod.torch.gradients.autotune.BUCKET_SIZES", [400, 150, 120, 50])
    with _spare_cores(True), sizes:
        yield


def _wrap(model: nn.Module, **options: Any) -> Any:
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return hvd.DistributedOptimizer(base, model.named_parameters(), **options)


def _step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    generator = torch.Generator().manual_seed(10 * number + hvd.rank())
    optimizer.zero_grad()
    (model(torch.randn(4, 6, generator=generator)) - 1).square().mean().backward()
    optimizer.step()


def _form(optimizer: Any) -> tuple[Any, ...]:
    """How gradients are reduced at the moment."""
    reducer, channel = optimizer._reducer, runtime.channel(0)
    sizes = tuple(len(bucket.params) for bucket in reducer._buckets)
    return reducer._overlap, sizes, channel.rounds.cycle, channel.transport.peer_memory


def _is_tuning(optimizer: Any) -> bool:
    return bool(optimizer._reducer.is_tuning())


def _until_settled(model: nn.Module, optimizer: Any) -> list[tuple[Any, ...]]:
    """Train until it has settled: how gradients were reduced, step by step."""
    forms = []
    for number in range(MOST_STEPS):
        _step(model, optimizer, number)
        forms.append(_form(optimizer))
        if not _is_tuning(optimizer):
            return forms
    raise AssertionError("it does not settle")


@contextlib.contextmanager
def _clock(cost: Callable[[], float]) -> Iterator[None]:
    """A clock by which a step takes as long as `cost` says at its end."""
    now = [0.0]

    def perf_counter() -> float:
        now[0] += cost()
        return now[0]

    # Of this module alone: others look at the clock as often as they like.
    with mock.patch.object(autotune, "time", SimpleNamespace(perf_counter=perf_counter)):
        yield


def _search(rank: int, size: int) -> Any:
    hvd.init()
    model = make_model("mlp")
    with _choice():
        optimizer = _wrap(model)
        forms = _until_settled(model, optimizer)
    for number in range(5):
        _step(model, optimizer, number)
        assert _form(optimizer) == forms[-1]
    return forms, weights_of(model)


def test_ranks_tune_together_and_results_stay_right(pool2: RankPool):
    first, second = run_ranks(_search, 2, env=ON)
    assert first[0] == second[0], "the ranks differ"
    forms = first[0]
    assert {sizes for _, sizes, _, _ in forms} == {(4,), (3, 1), (2, 1, 1), (1, 1, 1, 1)}
    assert {overlap for overlap, *_ in forms} == {False, True}
    assert {direct for *_, direct in forms} == {False, True}
    plain = pool2.run(_untuned, len(forms))
    for tuned in (first, second):
        for mine, theirs in zip(tuned[1], plain[0], strict=True):
            assert torch.equal(mine, theirs)


@_spare_cores(False)
def _untuned(steps: int) -> list[torch.Tensor]:
    model = make_model("mlp")
    optimizer = _wrap(model)
    for number in [*range(steps), *range(5)]:
        _step(model, optimizer, number)
        assert not _is_tuning(optimizer)
    return weights_of(model)


def _chosen(costs: dict[Any, float], slow_rank: int | None = None) -> Any:
    """What is chosen where the time of a step is known, by the form of the buckets."""
    model = make_model("mlp")
    with _choice():
        optimizer = _wrap(model)

        def cost() -> float:
            slow = slow_rank in (None, hvd.rank())
            return costs.get(_form(optimizer)[1], 1.0) if slow else 0.001

        with _clock(cost):
            return _until_settled(model, optimizer)[-1]


@pytest.mark.parametrize("slow_rank", [None, 0, 1])
def test_the_fastest_is_chosen(tuning2: RankPool, slow_rank: int | None):
    """By the time of the slowest rank."""
    chosen = tuning2.run(_chosen, {(3, 1): 0.9, (2, 1, 1): 0.95}, slow_rank)
    for overlap, sizes, _, _ in chosen:
        assert (overlap, sizes) == (True, (3, 1))


def test_the_default_stays_unless_another_is_clearly_faster(tuning2: RankPool):
    for overlap, sizes, _, _ in tuning2.run(_chosen, {(3, 1): 0.985}):
        assert (overlap, sizes) == (False, (4,))


@_spare_cores(False)
def _algorithm(rank: int, size: int) -> Any:
    hvd.init()
    model = make_model("mlp")
    optimizer = _wrap(model)
    transport = runtime.channel(0).transport
    with _clock(lambda: 1.0 if transport.peer_memory else 0.5):
        forms = _until_settled(model, optimizer)
    # A later optimizer keeps to what the first has found for all.
    other = make_model("mlp")
    with _clock(lambda: 0.5 if transport.peer_memory else 1.0):
        later = _until_settled(other, _wrap(other))
    return forms[-1], set(later)


def test_the_algorithm_is_tuned_once_for_all_optimizers():
    for settled, later in run_ranks(_algorithm, 2, env=ON):
        assert settled[-1] is False
        assert later == {settled}


def _change_amid_traffic() -> bool:
    channel = runtime.channel(0)
    handles = []
    for turn in range(20):
        for number in range(3):
            values = torch.full((60_000,), float(hvd.rank() + number))
            handles.append(hvd.allreduce_async_(values, op=hvd.Sum, name=f"{turn}.{number}"))
        channel.tune(0.5, ("staged", "direct")[turn % 2])
    results = [hvd.synchronize(handle) for handle in handles]
    channel.tune(1.0, "direct")
    return all(r.eq(1 + 2 * (place % 3)).all() for place, r in enumerate(results))


def test_an_algorithm_changes_between_the_same_operations_on_all_ranks(pool2: RankPool):
    assert pool2.run(_change_amid_traffic) == [True, True]


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "hook": lambda: {"communication_hook": hvd.hooks.TopK(0.5)},
    "sharded": lambda: {"shard_state": True},
    "compression": lambda: {"compression": hvd.Compression.fp16},
    "predivided": lambda: {"gradient_predivide_factor": 2.0},
}


def _with_options(name: str) -> Any:
    model = make_model("mlp")
    with _choice():
        forms = _until_settled(model, _wrap(model, **OPTIONS[name]()))
    return forms, weights_of(model)


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options(tuning2: RankPool, name: str):
    first, second = tuning2.run(_with_options, name)
    assert first[0] == second[0]
    assert all(map(torch.equal, first[1], second[1]))


def _in_a_set(rank: int, size: int) -> Any:
    some = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[some])
    model = make_model("mlp")
    optimizer = _wrap(model, process_set=some)
    flags = []
    for number in range(MOST_STEPS):
        _step(model, optimizer, number)
        if some.included():
            flags.append(_is_tuning(optimizer))
    return flags, weights_of(model)


def test_a_process_set():
    first, _, last = run_ranks(_in_a_set, 3, env=ON)
    assert first[0] == last[0]
    assert first[0][0] is True
    assert first[0][-1] is False
    assert all(map(torch.equal, first[1], last[1]))


# -- what is tried, without other ranks ------------------------------------------------------

MEBIBYTE = 1 << 20
AGREED = Agreement(
    number=0,
    overlap=False,
    direct=False,
    spare_cores=True,
    fusion_threshold=128 * MEBIBYTE,
    autotune=True,
    num_warmup=3,
    num_steps=10,
    most_samples=20,
    fixed=frozenset(),
    order=(0, 1, 2),
    sparse_dims=(0, 0, 0),
)
DEFAULT = autotune.Setting(False, 6 * MEBIBYTE, 1.0, "direct")


def _tried(agreed: Agreement, best: autotune.Setting = DEFAULT, grouped: bool = False) -> Any:
    """Of three layers of 3 MiB each: sizes (0: without overlap), cycle times and algorithms."""
    params = [(str(n), nn.Parameter(torch.empty(3 * MEBIBYTE // 4))) for n in range(3)]
    found = autotune.stages(DEFAULT, params, grouped, agreed, ["direct", "staged"])
    buckets, cycle_times, algorithms = (list(stage(best)) for stage in found)
    sizes = [setting.overlap * setting.bucket_bytes // MEBIBYTE for setting in buckets]
    times = [setting.cycle_time for setting in cycle_times]
    return sizes, times, [setting.algorithm for setting in algorithms]


def test_sizes_that_make_no_difference_are_not_tried():
    assert _tried(AGREED) == ([6, 32, 4, 0], [], ["direct", "staged"])


def test_cycle_times_matter_only_beside_backward():
    assert _tried(AGREED, replace(DEFAULT, overlap=True))[1] == autotune.CYCLE_TIMES


def test_without_a_core_to_spare_nothing_is_tried_beside_backward():
    assert _tried(replace(AGREED, spare_cores=False))[0] == [0]


def test_groups_are_tried_as_they_are():
    assert _tried(AGREED, grouped=True)[0] == [6, 0]


@pytest.mark.parametrize(
    ("knob", "place", "expected"),
    [
        ("overlap_backward", 0, []),
        ("fusion_threshold", 0, [6, 0]),
        ("cycle_time", 1, []),
        ("shm_peer_memory", 2, []),
    ],
)
def test_knobs_that_the_user_has_set_are_not_tried(knob: str, place: int, expected: list[Any]):
    agreed = replace(AGREED, fixed=frozenset({knob}))
    assert _tried(agreed, replace(DEFAULT, overlap=True))[place] == expected


def test_a_search_for_overlap_alone():
    short = autotune.for_overlap_alone(replace(AGREED, fixed=frozenset(TUNABLE)))
    assert _tried(short, replace(DEFAULT, overlap=True)) == ([6, 0], [], [])
    assert short.most_samples == 2


# -- the log ---------------------------------------------------------------------------------


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _logged(rank: int, size: int, options: dict[str, Any]) -> list[Any]:
    hvd.init()
    model = make_model("mlp")
    with _choice():
        return _until_settled(model, _wrap(model, **options))


def test_log(tmp_path: Path):
    path = tmp_path / "log.csv"
    path.write_text("from before\n" * 100)
    forms, _ = run_ranks(_logged, 2, {}, env={**ON, "HOROVOD_AUTOTUNE_LOG": str(path)})
    assert path.read_text().startswith(UPSTREAM + ",overlap,algorithm,step_ms,phase,optimizer\n")
    assert " " not in path.read_text()
    rows = _rows(path)
    searched = [row for row in rows if row["phase"] == "search"]
    samples = [row for row in rows if row["phase"] != "best"]
    assert len(forms) == 3 * (len(samples) + 2)  # one before it begins, and one to warm up
    assert [row["phase"] for row in rows].count("best") == 1
    assert rows[-1]["phase"] == "best"
    assert rows[-1]["overlap"] == str(int(forms[-1][0]))
    assert float(rows[-1]["cycle_time_ms"]) / 1000 == forms[-1][2]
    assert {row["overlap"] for row in searched} == {"0", "1"}
    assert {row["algorithm"] for row in searched} == {"direct", "staged"}
    nbytes = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    for row in rows:
        expected_score = nbytes / (1000 * float(row["step_ms"]))
        assert float(row["score"]) == pytest.approx(expected_score, rel=1e-4)
        assert row["cache_enabled"] == "1"
        assert row["torus_allreduce"] == row["hierarchical_allreduce"] == "0"


@pytest.mark.parametrize(
    ("fixed", "options"),
    [
        (
            {
                "HOROVOD_FUSION_THRESHOLD": "150",
                "HOROVOD_CYCLE_TIME": "2",
                "HOROVOD_SHM_PEER_MEMORY": "1",
            },
            {},
        ),
        ({"HOROVOD_CYCLE_TIME": "1", "HOROVOD_SHM_PEER_MEMORY": "0"}, {"groups": 3}),
    ],
    ids=["variables", "groups"],
)
def test_what_the_user_has_set_stays(
    tmp_path: Path, fixed: dict[str, str], options: dict[str, Any]
):
    path = tmp_path / "log.csv"
    env = {**ON, **fixed, "HOROVOD_AUTOTUNE_LOG": str(path)}
    forms, others = run_ranks(_logged, 2, options, env=env)
    assert forms == others
    direct = fixed["HOROVOD_SHM_PEER_MEMORY"] == "1"
    cycle = float(fixed["HOROVOD_CYCLE_TIME"]) / 1000
    cuts = {(3, 1)} if not options else {(2, 1, 1)}
    at_once = {(4,)} if not options else {(2, 1, 1)}
    assert {form for form in forms if form[0]} == {(True, cut, cycle, direct) for cut in cuts}
    assert {form for form in forms if not form[0]} == {
        (False, cut, cycle, direct) for cut in at_once
    }
    assert len({row["tensor_fusion_threshold"] for row in _rows(path)}) == 1


def _on_two_hosts(rank: int, size: int) -> Any:
    os.environ["HOROVOD_HOSTNAME"] = f"host{rank % 2}"
    hvd.init()
    model = make_model("mlp")
    optimizer = _wrap(model)
    transport = runtime.channel(0).transport
    flat = []
    with _clock(lambda: 0.5 if transport._by_flat else 1.0):
        while not flat or _is_tuning(optimizer):
            _step(model, optimizer, len(flat))
            flat.append(transport._by_flat)
    return flat, weights_of(model)


def test_hosts(tmp_path: Path):
    """Between hosts the algorithm is whether to reduce inside each of them first."""
    path = tmp_path / "log.csv"
    results = run_ranks(_on_two_hosts, 3, env={**ON, "HOROVOD_AUTOTUNE_LOG": str(path)})
    for flat, weights in results:
        assert flat == results[0][0]
        assert all(map(torch.equal, weights, results[0][1]))
    assert results[0][0][-1] is True
    rows = _rows(path)
    assert {row["hierarchical_allreduce"] for row in rows} == {"0", "1"}
    assert rows[-1]["hierarchical_allreduce"] == "0"
    assert {row["hierarchical_allgather"] for row in rows} == {"1"}


@_spare_cores(False)
def _only_one_rank(rank: int, size: int) -> bool:
    os.environ["HOROVOD_AUTOTUNE"] = str(rank)
    hvd.init()
    model = make_model("mlp")
    optimizer = _wrap(model)
    _step(model, optimizer)
    return _is_tuning(optimizer)


def test_asked_for_on_one_rank_only():
    assert run_ranks(_only_one_rank, 2) == [False, False]


def test_a_log_that_cannot_be_written(tmp_path: Path):
    missing = tmp_path / "no such folder" / "log.csv"
    forms, _ = run_ranks(_logged, 2, {}, env={**ON, "HOROVOD_AUTOTUNE_LOG": str(missing)})
    assert forms


# -- several optimizers, joins, other ranks --------------------------------------------------


def _two_optimizers() -> Any:
    models = [make_model("mlp", seed) for seed in (1, 2)]
    with _choice():
        optimizers = [_wrap(model) for model in models]
        forms = []
        for number in range(2 * MOST_STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                _step(model, optimizer, number)
            forms.append(tuple(_form(optimizer)[:2] for optimizer in optimizers))
            if not any(map(_is_tuning, optimizers)):
                break
    return forms, [weights_of(model) for model in models], sum(map(_is_tuning, optimizers))


def test_two_optimizers_take_turns(tuning2: RankPool):
    first, second = tuning2.run(_two_optimizers)
    assert first[0] == second[0], "the ranks differ"
    assert first[2] == second[2] == 0, "one does not settle"
    for mine, theirs in zip(first[1], second[1], strict=True):
        assert all(map(torch.equal, mine, theirs))
    begun = next(place for place, form in enumerate(first[0]) if form[1] != (False, (4,)))
    settled = {form[0] for form in first[0][begun:]}
    assert len(settled) == 1, "both were tuned at a time"


def _dropped() -> int:
    """An optimizer that is given up before it has settled is not waited for."""
    model, other = make_model("mlp"), make_model("mlp")
    with _choice():
        optimizer = _wrap(model)
        for number in range(10):
            _step(model, optimizer, number)
        assert _is_tuning(optimizer)
        del optimizer
        gc.collect()
        return len(_until_settled(other, _wrap(other)))


def test_an_optimizer_that_is_gone_does_not_hold_up_others(tuning2: RankPool):
    first, second = tuning2.run(_dropped)
    assert first == second


def _epochs() -> Any:
    model = make_model("mlp")
    forms = []
    with _choice():
        optimizer = _wrap(model)
        for epoch in range(MOST_STEPS):
            num_steps = 4 + ((epoch + hvd.rank()) % 2) * 3  # one has more batches, by turns
            for number in range(num_steps):
                _step(model, optimizer, number)
            hvd.join()
            forms.append((_form(optimizer), _is_tuning(optimizer)))
            if not _is_tuning(optimizer):
                break
    return forms, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_join_while_tuning(tuning2: RankPool):
    first, second = tuning2.run(_epochs)
    assert first == second
    assert first[0][-1][1] is False, "it does not settle"


def _other_job(rank: int, size: int) -> Any:
    """Shut down and begin again, in the midst of it: all is measured anew."""
    model = make_model("mlp")
    forms = []
    with _choice():
        hvd.init()
        optimizer = _wrap(model)
        for job in range(3):
            for number in range(25 + job):
                _step(model, optimizer, number)
                forms.append(_form(optimizer)[:2])
            hvd.shutdown()
            hvd.init()
        _until_settled(model, optimizer)
    assert len(set(forms)) > 1
    return forms, weights_of(model)


def test_another_job_in_the_same_process():
    first, second = run_ranks(_other_job, 2, env=ON)
    assert first[0] == second[0]
    assert all(map(torch.equal, first[1], second[1]))


def test_a_worker_is_lost_while_tuning():
    with ElasticJob(train_elastic, Plan(steps=60, halt={"w1": 31}), env=ON) as job:
        job.start(3)
        assert job.heard(1) == "halt"
        job.kill(1)
        job.lose(1)
        outcomes = job.wait(ranks=[0, 2])
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert outcome.result["weights"] == pytest.approx(expected(60), abs=1e-5)


def test_the_clock_of_an_accelerator():
    if find_accelerator() is None:
        pytest.skip("there is no accelerator")
    device = find_accelerator()
    assert device is not None
    clock, busy = autotune.StepClock(device), torch.ones(4000, 4000, device=device)
    busy = busy @ busy * 1e-4  # the first product loads libraries
    for repeats in (0, 1, 30, 1):
        for _ in range(repeats):
            busy = busy @ busy * 1e-4
        clock.mark()
    short, long, _ = clock.seconds()
    assert 0 < short < long
