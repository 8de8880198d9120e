"""join: ranks without data stand aside while the others go on."""

from __future__ import annotations

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.ranks import RankPool


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_averages_divide_by_all_ranks(tf_pool3: RankPool, mode: str):
    def epochs(mode: str) -> list[tuple[list[float], int]]:
        """Rank r has r + 1 batches."""

        def reduce(x):
            return hvd.allreduce(x, name="batch"), *hvd.grouped_allreduce([x, x], name="group")

        step, join = reduce, hvd.join
        if mode == "function":
            step, join = tf.function(reduce), tf.function(hvd.join)
        seen = []
        for _ in range(3):
            batches = []
            for _ in range(hvd.rank() + 1):
                results = [float(result) for result in step(tf.constant(6.0))]
                assert results[0] == results[1] == results[2]
                batches.append(results[0])
            last = join()
            assert last.dtype == tf.int32
            assert last.shape == ()
            seen.append((batches, int(last)))
        return seen

    batches = [6.0, 4.0, 2.0]
    for rank, seen in enumerate(tf_pool3.run(epochs, mode)):
        assert seen == [(batches[: rank + 1], 2)] * 3


def test_other_collectives_fail_while_a_rank_has_joined(tf_pool3: RankPool):
    def go_on() -> tuple[int, float]:
        if hvd.rank() != 1:
            slices = tf.IndexedSlices(tf.ones(1), [0])
            for call in (
                lambda: hvd.allgather([1.0], name="e"),
                lambda: hvd.broadcast(1.0, 0, name="e"),
                lambda: hvd.alltoall(tf.ones(3), name="e"),
                lambda: hvd.reducescatter(tf.ones(3), name="e"),
                lambda: hvd.allreduce(slices, name="slices"),
            ):
                with pytest.raises(tf.errors.FailedPreconditionError, match="has joined"):
                    call()
                with pytest.raises(tf.errors.FailedPreconditionError, match="has joined"):
                    tf.function(call)()
        last = int(hvd.join())
        return last in (0, 2), float(hvd.allreduce(1.0, op=hvd.Sum))

    assert tf_pool3.run(go_on) == [(True, 3.0)] * 3
