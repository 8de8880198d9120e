"""Adasum against a plain numpy reference, on real ranks and on ranks that are threads."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.common.config import Config
from horovod.common.reduce_op import ReduceOp
from horovod.common.store import MemoryStore, PrefixStore, StoreClient
from horovod.engine.execution.adasum import BLOCK, adasum_, segments_of_slice
from horovod.transport.base import Group, Transport
from horovod.transport.host.shared_memory import SharedMemoryTransport
from horovod.transport.network.tcp import TcpTransport
from horovod.transport.select import by_host
from tests.effort import examples
from tests.ranks import PATIENCE, run_ranks

TOLERANCES = {
    torch.float64: (1e-12, 1e-14),
    torch.float32: (2e-6, 1e-6),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
}


def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The formula, word by word."""
    dot, a_norm, b_norm = a @ b, a @ a, b @ b
    tiny = np.sqrt(np.finfo(np.float64).tiny)
    a_part = 1 if a_norm < tiny else 1 - dot / (2 * a_norm)
    b_part = 1 if b_norm < tiny else 1 - dot / (2 * b_norm)
    return a_part * a + b_part * b


def reference(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """One tensor of all ranks: neighbours pair up until one is left, an odd one waits."""
    while len(vectors) > 1:
        paired = [combine(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = [*paired, vectors[-1]] if len(vectors) % 2 else paired
    return vectors[0]


class ThreadTransport(Transport):
    """The seam between threads of one process: ranks put tensors on a table and read them."""

    name = "THREADS"

    def __init__(self, rank: int, size: int, table: list, meeting: threading.Barrier) -> None:
        super().__init__(Group(rank, size, tuple(range(size)), MemoryStore(), Config()))
        self._table = table
        self._meeting = meeting

    def _share(self, item: object) -> list:
        self._table[self.rank] = item
        self._meeting.wait(30)
        everything = list(self._table)
        self._meeting.wait(30)
        return everything

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        assert op is ReduceOp.SUM
        tensor.copy_(sum(self._share(tensor.clone())))

    def allgather(self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int]) -> None:
        assert source.numel() == counts[self.rank]
        output.copy_(torch.cat(self._share(source.clone())))

    def alltoall(
        self,
        source: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        parts = self._share(source.clone().split(list(send_counts)))
        mine = [part[self.rank] for part in parts]
        assert [len(part) for part in mine] == list(receive_counts)
        output.copy_(torch.cat(mine))

    def reduce_scatter(
        self, source: torch.Tensor, output: torch.Tensor, counts: Sequence[int], op: ReduceOp
    ) -> None:
        raise NotImplementedError("Adasum does not scatter sums")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tensor.copy_(self._share(tensor.clone())[root])

    def barrier(self) -> None:
        self._meeting.wait(30)

    def abort(self, reason: str) -> None:
        self._meeting.abort()

    def close(self) -> None:
        pass


def on_threads(
    inputs: Sequence[Sequence[torch.Tensor]], hosts: Sequence[Sequence[int]] | None = None
) -> list[list[torch.Tensor]]:
    """Adasum of `inputs`, a list of tensors per rank; the results of every rank."""
    size = len(inputs)
    table: list = [None] * size
    meeting = threading.Barrier(size)
    results = [[tensor.clone() for tensor in tensors] for tensors in inputs]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = ThreadTransport(rank, size, table, meeting)
        try:
            adasum_(results[rank], transport, hosts)
        except BaseException as error:
            errors.append(error)
            transport.abort("failed")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def random_inputs(
    size: int, lengths: Sequence[int], dtype: torch.dtype, seed: int = 0
) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
            for length in lengths
        ]
        for _ in range(size)
    ]


def check(
    inputs: Sequence[Sequence[torch.Tensor]],
    results: Sequence[Sequence[torch.Tensor]],
    hosts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Every rank has the reference's values, and bitwise the same ones."""
    relative, absolute = TOLERANCES[inputs[0][0].dtype]
    for index, first in enumerate(results[0]):
        vectors = [tensors[index].double().numpy() for tensors in inputs]
        if hosts is not None:
            vectors = [np.mean([vectors[rank] for rank in ranks], axis=0) for ranks in hosts]
        expected = reference(vectors)
        scale = max([1.0, *(float(t[index].double().norm()) for t in inputs if len(first))])
        np.testing.assert_allclose(
            first.double().numpy(), expected, rtol=relative, atol=absolute * scale
        )
        for other in results:
            assert other[index].dtype == first.dtype
            assert torch.equal(
                other[index].contiguous().view(torch.uint8), first.contiguous().view(torch.uint8)
            )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_any_number_of_ranks_and_dtype(size, dtype):
    inputs = random_inputs(size, [17, 1, 0, 64, 5], dtype)
    check(inputs, on_threads(inputs))


@settings(max_examples=examples(60), deadline=None)
@given(
    size=st.integers(2, 5),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 10_000),
)
def test_any_shapes(size, lengths, dtype, seed):
    inputs = random_inputs(size, lengths, dtype, seed)
    check(inputs, on_threads(inputs))


@settings(max_examples=examples(60), deadline=None)
@given(
    names=st.lists(st.sampled_from("abc"), min_size=2, max_size=6),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 10_000),
)
def test_ranks_of_one_host_that_count_as_one(names, lengths, dtype, seed):
    hosts = by_host(names)
    inputs = random_inputs(len(names), lengths, dtype, seed)
    check(inputs, on_threads(inputs, hosts), hosts)


def test_slices_longer_than_a_block():
    inputs = random_inputs(2, [3 * BLOCK + 5, 7, 2 * BLOCK], torch.float32)
    check(inputs, on_threads(inputs))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_orthogonal_inputs_add(size):
    inputs = [[torch.eye(size, dtype=torch.float64)[rank] * (rank + 1)] for rank in range(size)]
    for (result,) in on_threads(inputs):
        assert result.tolist() == [float(rank + 1) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_equal_inputs_stay_as_they_are(size):
    inputs = [[torch.tensor([1.5, -2.0, 0.25])] for _ in range(size)]
    for (result,) in on_threads(inputs):
        assert result.tolist() == [1.5, -2.0, 0.25]


def test_parallel_inputs_average():
    vector = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    for (result,) in on_threads([[vector], [3 * vector]]):
        torch.testing.assert_close(result, 2 * vector)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_zero_vector_changes_nothing(size):
    inputs = [[torch.zeros(5), torch.zeros(2)] for _ in range(size)]
    inputs[1] = random_inputs(1, [5, 2], torch.float32)[0]
    for results in on_threads(inputs):
        assert [r.tolist() for r in results] == [i.tolist() for i in inputs[1]]


def test_all_zero_gives_zero():
    for (result,) in on_threads([[torch.zeros(3)]] * 3):
        assert result.tolist() == [0.0, 0.0, 0.0]


def test_norms_too_small_to_divide_by_add():
    tiny = torch.full((2,), 1e-80, dtype=torch.float64)
    for (result,) in on_threads([[tiny], [tiny]]):
        assert result.tolist() == [2e-80, 2e-80]


def test_half_precision_does_not_overflow_inside():
    big = torch.full((64,), 60000.0, dtype=torch.float16)
    for (result,) in on_threads([[big], [big]]):
        assert torch.equal(result, big)


@settings(max_examples=examples(20), deadline=None)
@given(order=st.permutations(range(5)), size=st.integers(2, 4))
def test_the_order_of_tensors_does_not_matter(order, size):
    inputs = random_inputs(size, [3, 11, 1, 8, 30], torch.float64)
    plain = on_threads(inputs)[0]
    permuted = on_threads([[tensors[index] for index in order] for tensors in inputs])[0]
    for index, result in zip(order, permuted, strict=True):
        torch.testing.assert_close(result, plain[index], rtol=1e-12, atol=1e-14)


def test_fusing_tensors_does_not_change_them():
    inputs = random_inputs(3, [9, 4, 13], torch.float64)
    together = on_threads(inputs)[0]
    for index, result in enumerate(together):
        (alone,) = on_threads([[tensors[index]] for tensors in inputs])[0]
        torch.testing.assert_close(result, alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "tensors",
    [[torch.ones(2, dtype=torch.int32)], [torch.ones(2), torch.ones(2, dtype=torch.float64)]],
    ids=["integers", "two dtypes"],
)
def test_wrong_dtypes_are_refused(tensors):
    with pytest.raises(
        ValueError, match=r"float16, bfloat16, float32 and float64.*got (int32|float)"
    ):
        on_threads([tensors])


def test_segments_of_a_slice():
    assert segments_of_slice([3, 0, 4, 2], begin=2, length=5) == [(0, 0, 1), (2, 1, 5)]
    assert segments_of_slice([3, 4], begin=7, length=0) == []


# -- real ranks ------------------------------------------------------------------------------

REAL_LENGTHS = [1000, 3, 0, 70_000, 1]


def rank_of_adasum(
    rank: int, size: int, kind: type[Transport], dtype: torch.dtype
) -> list[torch.Tensor]:
    environ = os.environ
    store = StoreClient(
        environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
        int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
        base64.b64decode(environ["_HOROVOD_SECRET_KEY"]),
        timeout=PATIENCE,
    )
    prefixed = PrefixStore(store, "adasum/")
    transport = kind(Group(rank, size, tuple(range(size)), prefixed, Config()))
    tensors = random_inputs(size, REAL_LENGTHS, dtype)[rank]
    try:
        adasum_(tensors, transport)
    finally:
        transport.close()
        store.close()
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", [SharedMemoryTransport, TcpTransport])
def test_on_real_ranks(kind, size, dtype):
    results = run_ranks(rank_of_adasum, size, kind, dtype)
    check(random_inputs(size, REAL_LENGTHS, dtype), results)
