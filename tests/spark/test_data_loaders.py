"""The loaders of horovod.spark.data_loaders over our reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from horovod.spark.common.reading.reader import ParquetReader
from horovod.spark.data_loaders import pytorch_data_loaders as loaders
from tests.spark.parquet import write


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    numbers = np.arange(40)
    columns = {"i": numbers, "v": [[float(n), -float(n)] for n in numbers]}
    return str(write(tmp_path_factory.mktemp("loaders") / "data", columns))


def numbers(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch["i"]]


def test_batches_of_tensors(data: str):
    with ParquetReader(data) as reader:
        loader = loaders.PytorchDataLoader(reader, 16, 0, name="train", verbose=True)
        for _ in range(2):  # the reader begins again
            batches = list(loader)
            assert [len(batch["i"]) for batch in batches] == [16, 16, 8]
            assert numbers(batches) == list(range(40))
        assert len(loader) == 3
        assert batches[0]["v"].dtype == torch.float64
        assert batches[0]["v"].shape == (16, 2)
        batches[0]["v"] += 1  # they may be written to


def test_shuffled_and_limited(data: str):
    with ParquetReader(data) as reader:
        loader = loaders.PytorchDataLoader(reader, 8, 20, limit_step_per_epoch=3)
        assert len(loader) == 3
        found = numbers(loader)
        assert len(found) == len(set(found)) == 24
        assert found != sorted(found)


def test_asynchronous(data: str):
    with ParquetReader(data) as reader:
        loader = loaders.PytorchAsyncDataLoader(
            reader=reader, batch_size=10, shuffling_queue_capacity=0, async_loader_queue_size=2
        )
        assert [numbers(loader) for _ in range(2)] == [list(range(40))] * 2
        loader.close_async_loader()


@pytest.mark.parametrize(
    ("cls", "more"),
    [
        (loaders.PytorchInfiniteDataLoader, {}),
        (loaders.PytorchInfiniteAsyncDataLoader, {"async_loader_queue_size": 2}),
    ],
)
def test_without_end(data: str, cls: Any, more: Any):
    with ParquetReader(data, num_epochs=None) as reader:
        loader = cls(
            reader=reader,
            batch_size=10,
            shuffling_queue_capacity=0,
            limit_step_per_epoch=3,
            **more,
        )
        epochs = [numbers(loader) for _ in range(4)]
        assert [n for epoch in epochs for n in epoch] == [n % 40 for n in range(120)]
        if more:
            loader.close_async_loader()
    with ParquetReader(data) as reader, pytest.raises(ValueError, match="num_epochs=None"):
        cls(reader=reader, batch_size=10, shuffling_queue_capacity=0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_in_memory(data: str, shuffle: bool):
    with ParquetReader(data) as reader:
        loader = loaders.PytorchInmemDataLoader(
            reader, 10, num_epochs=2, shuffle=shuffle, limit_step_per_epoch=4
        )
        for _ in range(2):
            found = numbers(loader)
            assert sorted(found) == list(range(40))
            assert (found == sorted(found)) != shuffle
        assert numbers(loader) == [], "after num_epochs there is no more"
        loader = loaders.PytorchInmemAsyncDataLoader(
            reader=reader, batch_size=10, num_epochs=3, limit_step_per_epoch=4
        )
        assert numbers(loader) == list(range(40))
        loader.close_async_loader()
        with pytest.raises(ValueError, match="limit_step_per_epoch"):
            loaders.PytorchInmemDataLoader(reader, 10, num_epochs=2)


def test_the_plain_batched_loader_and_other_readers(data: str):
    with ParquetReader(data) as reader:
        loader = loaders.PetastormBatchedDataLoader(reader, 10, lambda batch: batch["i"].sum())
        assert [int(total) for total in loader] == [45, 145, 245, 345]

    class Foreign:
        """A reader that gives chunks and knows nothing more."""

        num_epochs = 1

        def __iter__(self) -> Any:
            yield {"i": np.arange(5)}
            yield {"i": np.arange(5, 9)}

    assert numbers(loaders.PytorchDataLoader(Foreign(), 4, 0)) == list(range(9))
    assert len(loaders.PytorchDataLoader(Foreign(), 4, 0)) == 0
