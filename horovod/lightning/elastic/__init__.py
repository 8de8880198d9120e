"""Elastic training with Lightning: a Trainer that survives the loss of ranks.

    state = TrainerState(module)

    @hvd.elastic.run
    def train(state):
        commits = CommitCallback(state, batches_per_commit=10)
        trainer = Trainer(strategy="horovod", max_epochs=10, callbacks=[commits])
        trainer.fit(module, loader, ckpt_path=state.checkpoint)

    train(state)

When ranks are lost or added, the function is called again, and the new fit continues from the last
commit. It restores weights, optimizers, schedulers, loops and callbacks, and divides the samples of
the epoch that no rank has seen yet among the present ranks.
"""

from __future__ import annotations

import typing

from horovod.lightning.elastic.state import TrainerState
from horovod.torch.elastic import run

__all__ = ["CommitCallback", "TrainerState", "run"]

if typing.TYPE_CHECKING:
    from horovod.lightning.elastic.callback import CommitCallbackMixin as CommitCallback


def __getattr__(name: str) -> typing.Any:
    """Return the callback, made for the package of Lightning that the program uses."""
    if name == "CommitCallback":
        from horovod.lightning.elastic.callback import commit_callback_class
        from horovod.lightning.flavours import preferred_flavour

        return commit_callback_class(preferred_flavour())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
