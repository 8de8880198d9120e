"""Train on handwritten digits with Lightning while processes and hosts come and go.

    horovodrun -np 2 --min-np 1 --max-np 4 -H localhost:4 \\
        python examples/elastic/pytorch_lightning_mnist_elastic.py

Kill one of its processes (`kill -9`) and watch the others go on from the last commit. It also runs
as it is under plain horovodrun, torchrun, mpirun, or alone. The data are the 1,797 images that come
with scikit-learn. Lines that exist because of elastic training are marked "Elastic".
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import horovod.torch as hvd
from horovod.lightning.elastic import CommitCallback, TrainerState

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pytorch"))
from pytorch_lightning_mnist import Digits, Net


class Report(pl.Callback):
    """Says on rank 0 how far training is."""

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero and trainer.state.fn == "fit":
            accuracy = trainer.callback_metrics["accuracy"].item()
            print(
                f"epoch {trainer.current_epoch + 1:2}: step {trainer.global_step}, "
                f"test accuracy {accuracy:.2%}, {trainer.world_size} process(es)",
                flush=True,
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--batches-per-commit", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.0015, help="learning rate of one process")
    parser.add_argument(
        "--warmup-epochs", type=int, default=3, help="epochs until it is that of all processes"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    pl.seed_everything(args.seed, verbose=False)
    module, data = Net(args.lr, args.warmup_epochs), Digits(args.batch_size)
    state = TrainerState(module)  # Elastic: what must outlive a process

    @hvd.elastic.run  # Elastic: called again after the processes have changed
    def train(state: TrainerState) -> Any:
        commits = CommitCallback(state, batches_per_commit=args.batches_per_commit)  # Elastic
        trainer = pl.Trainer(
            strategy="horovod",
            max_epochs=args.epochs,
            callbacks=[Report(), commits],  # Elastic: the commits come last
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        )
        trainer.fit(module, data, ckpt_path=state.checkpoint)  # Elastic: go on from the last commit
        return trainer.validate(module, data, verbose=False)[0]["accuracy"], trainer.is_global_zero

    hvd.init()
    accuracy, first = train(state)
    if first:
        print(f"final test accuracy: {accuracy:.2%}", flush=True)
        if args.target_accuracy is not None and accuracy < args.target_accuracy:
            print(f"below the target of {args.target_accuracy:.2%}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
