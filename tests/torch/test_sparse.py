"""allreduce of sparse tensors."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool

DENSE = [
    [[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]],
    [[0.0, 0.0, 4.0], [0.0, 8.0, 0.0]],
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],  # no entries at all
]


def _reduce(op: int, dtype: torch.dtype, name: str | None) -> torch.Tensor:
    tensor = torch.tensor(DENSE[hvd.rank()], dtype=dtype).to_sparse()
    wait = hvd.sparse_allreduce_async(tensor, name, op)
    result = wait()
    assert result.is_sparse
    assert result.dtype is dtype
    return result.to_dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("name", ["gradient", None])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_sum_and_average(pool3: RankPool, op: int, dtype: torch.dtype, name: str | None):
    total = torch.tensor(DENSE).sum(0)
    if op == hvd.Average:
        # Every entry is divided before duplicates are added up.
        parts = torch.tensor(DENSE) / 3
        total = (parts.trunc() if dtype is torch.int64 else parts).sum(0)
    for result in pool3.run(_reduce, op, dtype, name):
        torch.testing.assert_close(result, total.to(dtype))


def _rows() -> torch.Tensor:
    """Gradients of a sparse embedding: whole rows, one of them used by both ranks."""
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([0, 1 + hvd.rank(), 4])).sum().backward()
    return hvd.sparse_allreduce_async(embedding.weight.grad, "rows", hvd.Sum)().to_dense()


def test_gradients_of_an_embedding(pool2: RankPool):
    expected = torch.tensor([2.0, 1.0, 1.0, 0.0, 2.0]).unsqueeze(1).expand(5, 2)
    for result in pool2.run(_rows):
        assert torch.equal(result, expected)
