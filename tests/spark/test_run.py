"""``horovod.spark.run`` on a real cluster."""

from __future__ import annotations

from typing import Any

import horovod.spark


def places(base: int, step: int = 1) -> tuple[int, ...]:
    import torch

    import horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([base + step * hvd.rank()]), op=hvd.Sum)
    ranks = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()
    return (*ranks, hvd.cross_size(), int(total))


def test_ranks_by_host_and_results_in_their_order(spark: Any):
    assert horovod.spark.run(places, (10,), {"step": 2}, num_proc=4) == [
        (0, 4, 0, 2, 0, 2, 52),
        (1, 4, 1, 2, 0, 2, 52),
        (2, 4, 0, 2, 1, 2, 52),
        (3, 4, 1, 2, 1, 2, 52),
    ]
