"""One rank of benchmarks/local_quality.py: trains a GPT on Python's own library, byte by byte.

Started by `benchmarks.local_quality` with a plan in JSON as the only argument. Rank 0 writes the
curve to the plan's result file after each evaluation, so that a job that is ended early leaves what
it has found.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd

RANK = int(os.environ["RANK"])
VOCABULARY = 256
HEAD_WIDTH = 64
VALIDATION_TEXTS = 32  # of one batch
VALIDATION_BATCHES = {"cuda": 16, "cpu": 4}  # fewer where they take as long as many steps

Tensor = torch.Tensor


class Block(nn.Module):
    """One layer: causal attention, then two linear maps, each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder over bytes with learned positions; the embedding is the output's matrix too."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                # What is added to the residual stream must not grow with the number of layers.
                adds = name.endswith(("attended.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(x), self.tokens.weight)


def corpus() -> tuple[Tensor, Tensor]:
    """The sources of the standard library without its tests: to train with, and held out.

    Whole files are held out, one of ten, and which ones is the same everywhere.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(file.relative_to(library) for file in library.rglob("*.py"))
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [name for name in names if not foreign & set(name.parts)]
    random.Random(0).shuffle(files)
    held_out = len(files) // 10

    def joined(chosen: list[Path]) -> Tensor:
        content = b"\n".join((library / name).read_bytes() for name in chosen)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    return joined(files[held_out:]), joined(files[:held_out])


class Texts:
    """Batches of texts from random positions of a corpus, which is on the device."""

    def __init__(self, content: Tensor, context: int, device: torch.device) -> None:
        self._content = content.to(device)
        self._offsets = torch.arange(context + 1, device=device)
        self._device = device

    def batches(self, count: int, texts: int, seed: int) -> list[Tensor]:
        """Where the texts of `count` batches begin, drawn at once: training waits for no copy."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self._content) - len(self._offsets)
        starts = torch.randint(last, (count, texts, 1), generator=generator)
        return list(starts.to(self._device))

    def loss(self, model: nn.Module, starts: Tensor) -> Tensor:
        """The loss of predicting each next byte of the texts that begin at `starts`."""
        tokens = self._content[starts + self._offsets].long()
        # bfloat16 where people would use it.
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def arguments(configuration: str, plan: dict[str, Any]) -> dict[str, Any]:
    """The arguments of DistributedOptimizer that a configuration stands for."""
    if configuration == "every":
        return {}
    chosen = {
        "local_steps": plan["local_steps"],
        "outer": hvd.OuterSGD(lr=0.7, momentum=0.9, nesterov=True),
        "warmup_steps": plan["warmup"],
    }
    more: dict[str, dict[str, Any]] = {
        "local": {},
        "streaming": {"fragments": 4, "delay": 5},
        "fp8": {"compression": hvd.Compression.fp8},
    }
    return chosen | more[configuration]


def learning_rate(step: int, plan: dict[str, Any]) -> float:
    """A linear rise over a twentieth of the steps, then a cosine down to a tenth."""
    steps, rise = plan["steps"], max(1, plan["steps"] // 20)
    if step < rise:
        return float(plan["lr"]) * (step + 1) / rise
    progress = (step - rise) / max(1, steps - rise)
    return float(plan["lr"]) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(plan: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(plan["seed"])
    model = GPT(plan["layers"], plan["width"], plan["context"]).to(device)
    training, held_out = (Texts(part, plan["context"], device) for part in corpus())
    steps, texts = plan["steps"], plan["batch"]
    batches = training.batches(steps, texts, 1000 * plan["seed"] + RANK)
    validation = held_out.batches(VALIDATION_BATCHES[device.type], VALIDATION_TEXTS, 0)
    inner = torch.optim.AdamW(
        model.parameters(),
        lr=plan["lr"],
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=device.type == "cuda",
    )
    optimizer = hvd.DistributedOptimizer(
        inner, model.named_parameters(), **arguments(plan["configuration"], plan)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    began, curve = time.monotonic(), []
    for step, starts in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan)
        optimizer.zero_grad()
        training.loss(model, starts).backward()
        optimizer.step()
        if step + 1 == steps and plan["configuration"] != "every":
            optimizer.synchronize_parameters()
        if step + 1 == steps or (step + 1) % plan["evaluate"] == 0:
            curve.append((step + 1, evaluate(model, held_out, validation)))
            if RANK == 0:
                report(plan, curve, time.monotonic() - began)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Texts, validation: list[Tensor]) -> float:
    """The loss on held-out texts, averaged over ranks, which differ between synchronisations."""
    losses = torch.stack([held_out.loss(model, starts) for starts in validation])
    return float(hvd.allreduce(losses.mean(), name="validation"))


def report(plan: dict[str, Any], curve: list[tuple[int, float]], seconds: float) -> None:
    """Write what is known so far, and tell the starter of it."""
    result = Path(plan["result"])
    found = {"configuration": plan["configuration"], "seed": plan["seed"]}
    whole = result.with_suffix(".new")
    whole.write_text(json.dumps({**found, "curve": curve, "seconds": round(seconds, 1)}))
    whole.rename(result)
    step, loss = curve[-1]
    name = f"{plan['configuration']}, seed {plan['seed']}"
    print(f"done {name}: step {step}, loss {loss:.4f}, {seconds:.0f} s", flush=True)


def main(plan: dict[str, Any]) -> None:
    device = torch.device(plan["device"])
    if device.type == "cuda":
        # Not by the local rank: hosts that are only names share the GPUs of this machine.
        device = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(device)
    hvd.init()
    train(plan, device)
    hvd.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main(json.loads(sys.argv[1]))
