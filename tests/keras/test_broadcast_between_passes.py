"""The callback that makes ranks equal comes between two passes of a step, and leaves their sums."""

from __future__ import annotations

import numpy as np

from tests.keras.flavours import front_end
from tests.keras.training import fit_alone, fit_together
from tests.ranks import RankPool


def _train() -> tuple[list[np.ndarray], list[np.ndarray]]:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    together = fit_together(keras, hvd, optimizer, 2, callbacks=callbacks)
    plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return together.get_weights(), fit_alone(keras, plain, 2).get_weights()


def test_no_rank_loses_what_it_has_summed(keras3_pool: RankPool):
    for ours, reference in keras3_pool.run(_train):
        for one, other in zip(ours, reference, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
