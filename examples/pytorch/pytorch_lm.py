"""Train a small transformer to predict text, in mixed precision and with clipped gradients.

    horovodrun -np 2 python examples/pytorch/pytorch_lm.py

The text is Python's own language reference, which `help()` shows and every installation has; the
model reads and writes bytes. On CUDA it computes in float16 with a gradient scaler, elsewhere in
bfloat16, which needs none; on CPUs that have no instructions for it, which is most, in float32.
Lines that a single-process script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import horovod.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps-per-epoch", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="texts per process and step")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of one process")
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16", "float16"],
        help="default: float16 on CUDA, else bfloat16, or float32 on CPUs without it",
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/lm.pt"))
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--report-seconds", type=float, default=10.0, help="between lines where there is no bar"
    )
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and bytes to test with: the chapters in the order of their names."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def windows(data: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and for each byte in them the byte that follows it."""
    pieces = data[starts[:, None] + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


# -- model ---------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 32), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        inner = self.bytes(text) + self.places.weight[:length]
        inner = self.layers(inner, self.mask[:length, :length], is_causal=True)
        return F.linear(inner, self.bytes.weight)  # the embedding reads and writes: tied weights


def choose_device(cpu_only: bool) -> torch.device:
    """This process's own GPU if there is one, by local rank; else its share of the cores."""
    kind = None if cpu_only else torch.accelerator.current_accelerator(check_available=True)
    if kind is not None:
        index = hvd.local_rank() % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        return torch.device(kind.type, index)
    if "OMP_NUM_THREADS" not in os.environ:  # horovodrun and torchrun set it
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    return torch.device("cpu")


def choose_precision(wanted: str | None, device: torch.device) -> torch.dtype:
    if wanted is not None:
        return getattr(torch, wanted)
    if device.type == "cpu":  # without instructions of its own bfloat16 is many times slower
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies in bfloat16: avx512_bf16, amx_bf16 or, on Arm, bf16."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return False
    return not words.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


# -- training ------------------------------------------------------------------------------------


class Trainer:
    """The model with all that it takes to train it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.precision = choose_precision(args.precision, device)
        self.model = LanguageModel(args.context, args.width, args.layers).to(device)
        optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98))
        # Horovod: all start from what rank 0 has.
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        # Horovod: average the gradients over all processes before every step.
        self.optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=self.model.named_parameters()
        )
        # A small float16 gradient would become 0, so it is computed many times as large.
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is torch.float16)
        self.steps = 0

    def loss(self, text: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(
            self.device.type, self.precision, enabled=self.precision is not torch.float32
        ):
            scores = self.model(text.to(self.device))
        return F.cross_entropy(scores.flatten(0, 1).float(), following.to(self.device).flatten())

    def step(self, text: Tensor, following: Tensor) -> Tensor:
        """Learn from one batch of this process; its loss."""
        self.steps += 1
        # Horovod: Adam's rate goes with the square root of the batch of all processes.
        full = self.args.lr * math.sqrt(hvd.size())
        for group in self.optimizer.param_groups:
            group["lr"] = full * min(1.0, self.steps / self.args.warmup_steps)
        self.optimizer.zero_grad()
        loss = self.loss(text, following)
        self.scaler.scale(loss).backward()
        # Horovod: clip the average of all processes, not each one's part of it.
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        with self.optimizer.skip_synchronize():  # Horovod: done above
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @torch.no_grad()
    def perplexity(self, data: Tensor, batches: int = 8) -> float:
        """How many bytes the model hesitates between, on average, in text it has not seen."""
        starts = torch.linspace(
            0, len(data) - self.args.context - 1, batches * self.args.batch_size * hvd.size()
        ).long()
        # Horovod: every process takes its part; the average is over all.
        mine = starts[hvd.rank() :: hvd.size()].split(self.args.batch_size)
        losses = [self.loss(*windows(data, batch, self.args.context)) for batch in mine]
        return math.exp(hvd.allreduce(torch.stack(losses).mean(), name="validation").item())


def shows_progress() -> bool:
    """Only rank 0 draws a bar, and only where somebody watches.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stderr.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return hvd.rank() == 0 and watched


def main() -> None:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    torch.manual_seed(args.seed)
    device = choose_device(args.no_cuda)  # Horovod: one GPU for each process
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    train_data, test_data = load_text()
    trainer = Trainer(args, device)
    # Horovod: every process draws other pieces of the text.
    generator = torch.Generator().manual_seed(args.seed + 1 + hvd.rank())
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    say(
        f"{size} parameters, {len(train_data)} bytes of text, {hvd.size()} process(es) on "
        f"{device.type} in {str(trainer.precision).removeprefix('torch.')}"
    )
    perplexity = trainer.perplexity(test_data)
    say(f"before training: perplexity {perplexity:.2f}", flush=True)
    for epoch in range(args.epochs):
        started, total = time.monotonic(), torch.zeros((), device=device)
        told = started
        for step in tqdm(
            range(args.steps_per_epoch),
            desc=f"epoch {epoch + 1}/{args.epochs}",
            disable=not shows_progress(),
            leave=False,
            ncols=80,
        ):
            if not shows_progress() and time.monotonic() - told > args.report_seconds:
                told = time.monotonic()
                say(f"epoch {epoch + 1}: step {step} of {args.steps_per_epoch}", flush=True)
            starts = torch.randint(
                len(train_data) - args.context, (args.batch_size,), generator=generator
            )
            total += trainer.step(*windows(train_data, starts, args.context))
        loss = hvd.allreduce(total / args.steps_per_epoch, name="loss").item()
        seconds = time.monotonic() - started
        speed = args.steps_per_epoch * args.batch_size * args.context * hvd.size() / seconds
        perplexity = trainer.perplexity(test_data)
        hvd.stats.log(loss=loss, perplexity=perplexity)  # for `horovodrun --dashboard`
        say(
            f"epoch {epoch + 1}: training perplexity {math.exp(loss):.2f}, "
            f"perplexity {perplexity:.2f}, {speed:.0f} bytes/s",
            flush=True,
        )
    if hvd.rank() == 0:  # Horovod: all have the same model, one writes it
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(trainer.model.state_dict(), args.checkpoint)


if __name__ == "__main__":
    main()
