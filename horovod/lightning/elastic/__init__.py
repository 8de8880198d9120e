"""Elastic training with Lightning: a Trainer that survives the loss of ranks.

    state = TrainerState(module)

    @hvd.elastic.run
    def train(state):
        commits = CommitCallback(state, batches_per_commit=10)
        trainer = Trainer(strategy="horovod", max_epochs=10, callbacks=[commits])
        trainer.fit(module, loader, ckpt_path=state.checkpoint)

    train(state)

When ranks are lost or come, the function is called again, and the new fit goes on from the last
commit: with the weights, optimizers, schedulers, loops and callbacks of then, and with the samples
of the epoch that nobody has seen yet, divided among the ranks that are there now.
"""

from __future__ import annotations

import typing

from horovod.lightning.elastic.state import TrainerState
from horovod.torch.elastic import run

__all__ = ["CommitCallback", "TrainerState", "run"]

if typing.TYPE_CHECKING:
    from horovod.lightning.elastic.callback import Commits as CommitCallback


def __getattr__(name: str) -> typing.Any:
    """The callback, for the Lightning that the program uses."""
    if name == "CommitCallback":
        from horovod.lightning import flavours

        return flavours.commit_callback(flavours.preferred())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
