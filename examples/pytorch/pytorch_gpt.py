"""Train a small GPT on Python's own sources, the way larger ones are trained.

    horovodrun -np 2 python examples/pytorch/pytorch_gpt.py
    horovodrun -np 2 --dashboard python examples/pytorch/pytorch_gpt.py --steps 2000

Blocks are compiled, matrices are multiplied in bfloat16, gradients of several batches are added up
before they are averaged, and a checkpoint is written now and then: `--resume` goes on from the
newest, with the losses that the uninterrupted run would have had. The model reads and writes bytes.
Lines that a single-process script would not have are marked "Horovod".
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import horovod.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8, help="texts per process and pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes in a step")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of one process")
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        help="default: bfloat16, or float32 on CPUs without it",
    )
    parser.add_argument(
        "--backend", help="of torch.compile; default: inductor, or aot_eager without a C++ compiler"
    )
    parser.add_argument("--text-bytes", type=int, default=4_000_000, help="of Python's sources")
    parser.add_argument("--report-every", type=int, default=10, help="steps")
    parser.add_argument("--checkpoint-every", type=int, default=60, help="steps")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/gpt"))
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


def load_text(num_bytes: int) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and a tenth to test with: modules in the order of their names."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
    data = torch.frombuffer(text[:num_bytes], dtype=torch.uint8)
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def windows(data: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text, and for each byte in them the byte that follows it."""
    pieces = data[starts[:, None] + torch.arange(length + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


# -- model ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, then a layer for each position by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, inner: Tensor) -> Tensor:
        batch, length, width = inner.shape
        parts = self.queries_keys_values(self.before_attention(inner))
        queries, keys, values = (
            parts.view(batch, length, 3, self.heads, -1).transpose(1, 3).unbind(2)
        )
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        inner = inner + self.attended(found.transpose(1, 2).reshape(batch, length, width))
        return inner + self.layers(self.before_layers(inner))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        inner = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            inner = block(inner)
        return F.linear(self.last(inner), self.bytes.weight)  # it reads and writes: tied weights


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


def choose_backend(wanted: str | None, device: torch.device) -> str:
    """Inductor writes C++ for CPUs, which somebody must compile."""
    has_compiler = any(map(shutil.which, ("g++", "clang++", os.environ.get("CXX", "c++"))))
    return wanted or ("inductor" if has_compiler or device.type != "cpu" else "aot_eager")


def choose_precision(wanted: str | None, device: torch.device) -> torch.dtype:
    if wanted is not None:
        return getattr(torch, wanted)
    # Without instructions of its own bfloat16 is many times slower.
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bfloat16() else torch.float32


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
        self.backend = choose_backend(args.backend, device)
        self.model = GPT(args.context, args.width, args.layers, args.heads).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": args.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )
        # Horovod: average the gradients over all processes after so many backward passes.
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            backward_passes_per_step=args.accumulate,
        )
        # Horovod: compiled one by one, blocks hand out their gradients one by one, so that these
        # can travel while backward goes on.
        for block in self.model.blocks:
            block.compile(backend=self.backend)

    def loss(self, text: Tensor, following: Tensor) -> Tensor:
        is_narrow = self.precision is not torch.float32
        with torch.autocast(self.device.type, self.precision, enabled=is_narrow):
            scores = self.model(text.to(self.device))
        return F.cross_entropy(scores.flatten(0, 1).float(), following.to(self.device).flatten())

    def batches(self, data: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of a step. They depend on its number only, so that a resumed run has the same."""
        # Horovod: every process draws other pieces of the text.
        seed = (self.args.seed * 1_000_003 + step) * hvd.size() + hvd.rank()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.args.accumulate):
            highest = len(data) - self.args.context
            starts = torch.randint(highest, (self.args.batch_size,), generator=generator)
            yield windows(data, starts, self.args.context)

    def learning_rate(self, step: int) -> float:
        """Grows, then falls as a cosine does to a tenth."""
        # Horovod: Adam's rate goes with the square root of the batch of all processes.
        full = self.args.lr * math.sqrt(hvd.size())
        if step < self.args.warmup_steps:
            return full * (step + 1) / self.args.warmup_steps
        left = self.args.steps - self.args.warmup_steps
        progress = min(1.0, (step - self.args.warmup_steps) / max(1, left))
        return full * (0.55 + 0.45 * math.cos(math.pi * progress))

    def step(self, data: Tensor, step: int) -> Tensor:
        """Learn from the batches of one step; their average loss on this process."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for text, following in self.batches(data, step):
            loss = self.loss(text, following) / self.args.accumulate
            loss.backward()
            total += loss.detach()
        # Horovod: clip the average of all processes, not each one's part of it.
        self.optimizer.synchronize()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        with self.optimizer.skip_synchronize():  # Horovod: done above
            self.optimizer.step()
        return total

    @torch.no_grad()
    def test_loss(self, data: Tensor, batches: int = 8) -> float:
        """In text that it has not seen."""
        count = batches * self.args.batch_size * hvd.size()
        starts = torch.linspace(0, len(data) - self.args.context - 1, count).long()
        # Horovod: every process takes its part; the average is over all.
        mine = starts[hvd.rank() :: hvd.size()].split(self.args.batch_size)
        with torch.compiler.set_stance("force_eager"):  # too little to be worth compiling
            losses = [self.loss(*windows(data, part, self.args.context)) for part in mine]
        return hvd.allreduce(torch.stack(losses).mean(), name="test loss").item()

    @torch.no_grad()
    def write(self, text: Tensor, num_bytes: int) -> str:
        """What the model would write after `text`, drawn as likely as it thinks each byte is."""
        text = text[None].long().to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.args.seed)
        with torch.compiler.set_stance("force_eager"):
            for _ in range(num_bytes):
                scores = self.model(text[:, -self.args.context :])[:, -1]
                following = torch.multinomial(scores.softmax(-1), 1, generator=generator)
                text = torch.cat([text, following], dim=1)
        return bytes(text[0, -num_bytes:].tolist()).decode(errors="replace")

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, steps_done: int) -> None:
        if hvd.rank() != 0:  # Horovod: all have the same model, one writes it
            return
        self.args.checkpoints.mkdir(parents=True, exist_ok=True)
        path = self.args.checkpoints / f"step-{steps_done:08}.pt"
        whole = {
            "steps_done": steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(whole, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # whoever is killed before keeps the older one

    def start(self) -> int:
        """Begin anew or from the newest checkpoint; how many steps are done."""
        steps_done = 0
        found = sorted(self.args.checkpoints.glob("step-*.pt")) if self.args.resume else []
        if found and hvd.rank() == 0:
            whole = torch.load(found[-1], map_location=self.device)
            self.model.load_state_dict(whole["model"])
            self.optimizer.load_state_dict(whole["optimizer"])
            steps_done = whole["steps_done"]
        # Horovod: all start from what rank 0 has.
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        return hvd.broadcast_object(steps_done, root_rank=0, name="steps done")


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

    train_data, test_data = load_text(args.text_bytes)
    trainer = Trainer(args, device)
    steps_done = trainer.start()
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    say(
        f"{size} parameters, {len(train_data)} bytes of text, {hvd.size()} process(es) on "
        f"{device.type} in {str(trainer.precision).removeprefix('torch.')}, compiled by "
        f"{trainer.backend}, from step {steps_done + 1}",
        flush=True,
    )
    bar = tqdm(
        range(steps_done, args.steps),
        initial=steps_done,
        total=args.steps,
        disable=not shows_progress(),
        leave=False,
        ncols=80,
    )
    bytes_in_step = args.accumulate * args.batch_size * args.context * hvd.size()
    losses: list[Tensor] = []
    started = time.monotonic()
    for step in bar:
        losses.append(trainer.step(train_data, step))
        done = step + 1
        if done % args.report_every == 0 or done == args.steps:
            loss = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
            speed = len(losses) * bytes_in_step / (time.monotonic() - started)
            # For `horovodrun --dashboard`.
            hvd.stats.log(loss=loss, learning_rate=trainer.learning_rate(step))
            say(f"step {done}: loss {loss:.6f}, {speed:.0f} bytes/s", flush=True)
            losses.clear()
            started = time.monotonic()
        if done % args.checkpoint_every == 0 or done == args.steps:
            trainer.save(done)
    say(f"test loss {trainer.test_loss(test_data):.6f}", flush=True)
    say("it writes:", repr(trainer.write(test_data[: args.context], 60)), flush=True)


if __name__ == "__main__":
    main()
