"""Every sample of an epoch, whatever happens to the ranks: simulated with the real sampler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import horovod.torch as hvd
from horovod.torch.elastic import ElasticSampler
from tests.effort import examples
from tests.ranks import RankPool


class PlacedSampler(ElasticSampler):
    """A sampler of some rank of some job, without the job."""

    def __init__(self, place: tuple[int, int], dataset: Any, **options: Any) -> None:
        self.place = place
        super().__init__(dataset, **options)

    def _place(self) -> tuple[int, int]:
        return self.place


def samplers(size: int, length: int, **options: Any) -> list[PlacedSampler]:
    return [PlacedSampler((rank, size), range(length), **options) for rank in range(size)]


def change(
    old: list[PlacedSampler], size: int, state: dict[str, Any], length: int, **options: Any
) -> list[PlacedSampler]:
    """The ranks changed and all were given `state`: old ranks keep their sampler, others come."""
    made = [
        old[rank] if rank < len(old) else PlacedSampler((rank, size), range(length), **options)
        for rank in range(size)
    ]
    for rank, sampler in enumerate(made):
        sampler.place = rank, size
        sampler.load_state_dict(state)
    return made


def test_one_epoch_without_changes():
    ranks = samplers(3, 10, shuffle=False)
    assert [list(sampler) for sampler in ranks] == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    assert [len(sampler) for sampler in ranks] == [4, 4, 4]
    assert ranks[0].total_size == 12


def test_all_ranks_shuffle_alike_and_differently_in_each_epoch():
    first, second = samplers(2, 100, seed=7)
    assert sorted([*first, *second]) == list(range(100))
    before = list(first)
    assert before != sorted(before)
    first.set_epoch(1)
    assert list(first) != before


def test_processed_num_counts_all_replicas():
    (sampler, _) = samplers(2, 20, shuffle=False)
    sampler.record_batch(0, 3)
    assert sampler.processed_num == 6
    assert len(sampler) == 10  # until the ranks change
    sampler.reset()
    assert (len(sampler), sampler.remaining_indices[0]) == (7, 6)
    sampler.set_epoch(1)
    assert (sampler.processed_num, len(sampler)) == (0, 10)


def test_fewer_samples_than_ranks():
    ranks = samplers(4, 9, shuffle=False)
    for sampler in ranks:
        sampler.record_batch(0, 2)
        sampler.reset()
    assert [list(sampler) for sampler in ranks] == [[8]] * 4
    for sampler in ranks:
        sampler.record_batch(0, 2)
        sampler.reset()
    assert [list(sampler) for sampler in ranks] == [[]] * 4
    assert list(PlacedSampler((0, 2), [])) == []


def test_recorded_indices_are_left_out_and_batches_still_count():
    (sampler,) = samplers(1, 10, shuffle=False)
    sampler.record_indices([1, 4])
    sampler.reset()
    assert list(sampler) == [0, 2, 3, 5, 6, 7, 8, 9]
    assert sampler.get_indices(1, 3) == [5, 6, 7]
    sampler.record_batch(0, 3)  # 0, 2, 3
    assert sampler.processed_num == 4
    sampler.record_indices([8])
    (other,) = change([], 1, sampler.state_dict(), 10, shuffle=False)
    assert list(other) == [5, 6, 7, 9]
    other.record_batch(0, 4)
    other.reset()
    assert list(other) == []


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=examples(200), deadline=None)
def test_every_sample_is_processed(data: st.DataObject):
    """Random batches, commits, failures (back to the last commit) and changes at commits.

    What a model has learned is what is in `kept`: work since the last commit is lost by a failure.
    """
    length = data.draw(st.integers(1, 60), "length")
    options = {"shuffle": data.draw(st.booleans()), "seed": data.draw(st.integers(0, 3))}
    size = data.draw(st.integers(1, 5), "ranks")
    batch = data.draw(st.integers(1, 6), "batch size")
    ranks = samplers(size, length, **options)
    kept: Counter[int] = Counter()
    since_commit: Counter[int] = Counter()
    committed = ranks[0].state_dict()
    allowed_repeats, index = ranks[0].total_size - length, 0
    for _ in range(200):
        own = [list(sampler)[index * batch : (index + 1) * batch] for sampler in ranks]
        assert len({len(indices) for indices in own}) == 1, "ranks have equally many batches"
        if not own[0]:
            break
        for sampler, indices in zip(ranks, own, strict=True):
            since_commit.update(indices)
            sampler.record_batch(index, batch)
        index += 1
        event = data.draw(st.sampled_from(["go on", "go on", "commit", "change", "failure"]))
        if event in ("commit", "change"):
            kept += since_commit
            since_commit.clear()
            committed = ranks[0].state_dict()
        if event in ("change", "failure"):
            since_commit.clear()
            size = data.draw(st.integers(1, 5), "ranks")
            ranks = change(ranks, size, committed, length, **options)
            index = 0
            if event == "change":
                allowed_repeats += ranks[0].total_size - len(ranks[0].remaining_indices)
            else:  # padding that was repeated since the last commit comes again
                allowed_repeats += size - 1
    else:
        return  # failures all the time
    kept += since_commit
    assert set(kept) == set(range(length)), "every sample at least once"
    assert sum(kept.values()) - length <= allowed_repeats, "and no more than padding needs"


@hypothesis.given(
    st.integers(1, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=6)
)
@hypothesis.settings(max_examples=examples(100), deadline=None)
def test_ranks_that_process_different_numbers(length: int, phases: list[tuple[int, int]]):
    """With record_indices, exchanged when the ranks change: exactly once, but for the padding."""
    seen: Counter[int] = Counter()
    state = samplers(1, length)[0].state_dict()
    for size, most in [*phases, (2, length)]:
        ranks = change([], size, state, length)
        padding = set()
        for rank, sampler in enumerate(ranks):
            taken = list(sampler)[: most + rank]
            places = range(rank, sampler.total_size, size)
            real = [
                i for i, p in zip(taken, places, strict=False) if p < len(sampler.remaining_indices)
            ]
            padding.update(set(taken) - set(real))
            seen.update(real)
            sampler.record_indices(real)
        everyones = set().union(*(sampler.processed_indices for sampler in ranks))
        state = {**state, "processed_indices": sorted(everyones)}
    assert seen == Counter(range(length))


def _load(workers: int) -> list[int]:
    data = torch.utils.data.TensorDataset(torch.arange(23))
    sampler = ElasticSampler(data, seed=1)
    loader = torch.utils.data.DataLoader(data, 4, sampler=sampler, num_workers=workers)
    seen = []
    for index, (batch,) in enumerate(loader):
        seen += batch.tolist()
        sampler.record_batch(index, 4)
        if index == 1:
            break  # as a failure or a change would
    sampler.reset()
    for (batch,) in loader:
        seen += batch.tolist()
    assert len(loader) == -(-len(sampler) // 4)
    return hvd.allgather(torch.tensor(seen)).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_data_loader(pool2: RankPool, workers: int):
    seen, _ = pool2.run(_load, workers)
    assert set(seen) == set(range(23))
    assert len(seen) == 24  # 16 before the break, then 7 for 2 ranks


# -- iterators that are saved in the midst of an epoch, as torchdata's loaders do ----------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_iterator_goes_on_with_any_number_of_ranks(size: int, is_recorded: bool):
    old = samplers(2, 24, seed=5)
    drawn, states = [], []
    for sampler in old:
        samples = iter(sampler)
        drawn += [next(samples) for _ in range(3)]
        states.append(samples.state_dict())
        if is_recorded:
            sampler.record_batch(0, 3)
    assert states[0] == states[1]
    for sampler in samplers(size, 24, seed=5):
        sampler.load_state_dict(old[0].state_dict())
        samples = iter(sampler)
        samples.load_state_dict(states[0])
        drawn += list(samples)
        assert sampler.processed_num == 6
    assert sorted(drawn) == list(range(24))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own
@pytest.mark.parametrize("kind", ["elastic", "distributed"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_goes_on_where_it_was(kind: str, num_workers: int):
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )

    def loader_of() -> Any:
        sampler: Any = PlacedSampler((1, 2), range(30), seed=5)
        if kind == "distributed":
            sampler = torch.utils.data.DistributedSampler(range(30), 2, 1, seed=5)
        return torchdata.StatefulDataLoader(
            range(30), batch_size=2, sampler=sampler, num_workers=num_workers
        )

    loader, batches = loader_of(), []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 4:
            state = loader.state_dict()
    resumed = loader_of()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == batches[4:]
