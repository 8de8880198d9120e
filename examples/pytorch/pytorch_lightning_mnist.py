"""Train on handwritten digits with Lightning, on as many processes as you like.

    horovodrun -np 2 python examples/pytorch/pytorch_lightning_mnist.py
    torchrun --nproc-per-node 2 examples/pytorch/pytorch_lightning_mnist.py
    mpirun -np 2 python examples/pytorch/pytorch_lightning_mnist.py
    python examples/pytorch/pytorch_lightning_mnist.py

The data are the 1,797 images that come with scikit-learn. What a script without Horovod would not
have is the import of it, ``strategy="horovod"``, and the learning rate that goes with the size.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd  # Horovod: makes its strategy known to Lightning


class Digits(pl.LightningDataModule):
    """Images of one channel with values from 0 to 1, and their labels."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        labels = digits.target
        parts = train_test_split(
            digits.images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels
        )
        images = (torch.tensor(x, dtype=torch.float32).unsqueeze(1) for x in parts[:2])
        self.train_data, self.test_data = (
            TensorDataset(x, torch.tensor(y)) for x, y in zip(images, parts[2:], strict=True)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        # Lightning gives every process its own part, because the strategy says that there are some.
        return DataLoader(self.train_data, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test_data, 128)

    test_dataloader = val_dataloader


class Net(pl.LightningModule):
    def __init__(self, lr: float, warmup_epochs: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        correct = (self(images).argmax(1) == labels).float().mean()
        self.log("accuracy", correct, sync_dist=True, prog_bar=True)  # over all processes

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        # Horovod: N processes take N times the batch in a step, which may be N times as long; but
        # not from the start, which would throw the untrained model off.
        epoch = self.current_epoch + index / self.trainer.num_training_batches
        warmup = self.hparams.warmup_epochs
        progress = min(1.0, epoch / warmup) if warmup else 1.0
        for group in self.optimizers().param_groups:
            group["lr"] = self.hparams.lr * (1 + (self.trainer.world_size - 1) * progress)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.0015, help="learning rate of one process")
    parser.add_argument(
        "--warmup-epochs", type=int, default=3, help="epochs until it is that of all processes"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16-allreduce", action="store_true", help="16 bits on the wire")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--target-accuracy", type=float, help="exit with status 1 if the result is below (0 to 1)"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    pl.seed_everything(args.seed, verbose=False)
    strategy: Any = "horovod"
    if args.fp16_allreduce:  # Horovod: options of hvd.DistributedOptimizer
        from horovod.lightning import HorovodStrategy

        strategy = HorovodStrategy(compression=hvd.Compression.fp16)
    trainer = pl.Trainer(
        strategy=strategy,  # Horovod: the line that matters
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(args.checkpoint_dir, save_last=True)],
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        logger=False,
    )
    if trainer.is_global_zero:
        print(f"training with {trainer.world_size} process(es)", flush=True)
    last = args.checkpoint_dir / "last.ckpt"
    module, data = Net(args.lr, args.warmup_epochs), Digits(args.batch_size)
    trainer.fit(module, data, ckpt_path=last if args.resume else None)
    (result,) = trainer.test(module, data, verbose=False)

    if trainer.is_global_zero:
        print(f"final test accuracy: {result['accuracy']:.2%}", flush=True)
        if args.target_accuracy is not None and result["accuracy"] < args.target_accuracy:
            print(f"below the target of {args.target_accuracy:.2%}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
