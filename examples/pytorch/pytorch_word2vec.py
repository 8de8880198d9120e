"""Learn word vectors (skip-gram with negative sampling), exchanging only the rows that changed.

    horovodrun -np 2 python examples/pytorch/pytorch_word2vec.py

A batch touches a few of the vocabulary's vectors, so the gradients of the two embeddings are
sparse, and Horovod sends just those rows. The text is Python's own language reference, which
`help()` shows and every installation has. Lines that a single-process script would not have are
marked "Horovod".
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
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
    parser.add_argument("--batch-size", type=int, default=128, help="word pairs per process")
    parser.add_argument("--window", type=int, default=5, help="words to each side that matter")
    parser.add_argument("--negatives", type=int, default=5, help="random words per pair")
    parser.add_argument("--min-count", type=int, default=5, help="leave out rarer words")
    parser.add_argument("--width", type=int, default=64, help="length of a word vector")
    parser.add_argument("--optimizer", choices=["sparse-adam", "sgd"], default="sparse-adam")
    parser.add_argument(
        "--lr", type=float, help="of one process; default 0.003 (sparse-adam) or 20 (sgd)"
    )
    parser.add_argument("--words", nargs="*", default=["list", "class", "raised", "integer"])
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/word2vec.pt"))
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


class Corpus:
    """The text as numbers of words, and how often each word is there, most frequent first."""

    def __init__(self, min_count: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).lower()
        found = re.findall(r"[a-z]+", text)
        counts = Counter(found)
        self.words = sorted(
            (word for word, count in counts.items() if count >= min_count),
            key=lambda word: (-counts[word], word),
        )
        self.number = {word: number for number, word in enumerate(self.words)}
        self.text = torch.tensor([self.number[word] for word in found if word in self.number])
        self.counts = torch.tensor([counts[word] for word in self.words], dtype=torch.float)

    def pairs(self, window: int, generator: torch.Generator) -> Tensor:
        """(word, neighbour) pairs in random order. Words as frequent as "the" are thinned out."""
        share = self.counts / self.counts.sum()
        keep = (1e-3 / share).sqrt()[self.text]
        text = self.text[torch.rand(len(self.text), generator=generator) < keep]
        forward = [
            torch.stack([text[:-distance], text[distance:]], 1) for distance in range(1, window + 1)
        ]
        both = torch.cat([*forward, *(pairs.flip(1) for pairs in forward)])
        return both[torch.randperm(len(both), generator=generator)]


# -- model ---------------------------------------------------------------------------------------


class SkipGram(nn.Module):
    """Vectors of words, and of words as neighbours; both get sparse gradients."""

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width, sparse=True)
        self.neighbours = nn.Embedding(num_words, width, sparse=True)
        nn.init.uniform_(self.words.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.neighbours.weight)

    def forward(self, word: Tensor, neighbour: Tensor, strangers: Tensor) -> Tensor:
        """The loss: a word should be near its neighbours and far from random words."""
        others = torch.cat([neighbour[:, None], strangers], 1)
        nearness = torch.einsum("bw,bow->bo", self.words(word), self.neighbours(others))
        nearness[:, 1:] *= -1
        return -F.logsigmoid(nearness).sum(1).mean()


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


def make_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    # Horovod: N processes take N times the pairs in one step, so the step may be longer.
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=(args.lr or 20) * hvd.size())
    return torch.optim.SparseAdam(model.parameters(), lr=(args.lr or 0.003) * hvd.size())


def shows_progress() -> bool:
    """Only rank 0 draws a bar, and only where somebody watches.

    Under horovodrun a process writes to a pipe; the launcher says whether a terminal is behind.
    """
    watched = sys.stderr.isatty() or os.environ.get("HOROVOD_LAUNCHER_TTY") == "1"
    return hvd.rank() == 0 and watched


def nearest(model: SkipGram, word: int, count: int) -> list[int]:
    vectors = F.normalize(model.words.weight.detach())
    return (vectors @ vectors[word]).topk(count + 1).indices[1:].tolist()


def main() -> None:
    args = parse_arguments()
    hvd.init()  # Horovod: find the other processes
    torch.manual_seed(args.seed)
    device = choose_device(args.no_cuda)  # Horovod: one GPU for each process
    say = print if hvd.rank() == 0 else lambda *_, **__: None

    corpus = Corpus(args.min_count)
    stranger_weights = corpus.counts**0.75
    same_everywhere = torch.Generator().manual_seed(args.seed)
    my_own = torch.Generator().manual_seed(args.seed + 1 + hvd.rank())

    model = SkipGram(len(corpus.words), args.width).to(device)
    optimizer = make_optimizer(args, model)
    # Horovod: all start from what rank 0 has.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: average the gradients; of sparse ones, the rows that somebody has.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    say(
        f"{len(corpus.text)} words, {len(corpus.words)} different ones, "
        f"{hvd.size()} process(es) on {device.type}",
        flush=True,
    )
    for epoch in range(args.epochs):
        pairs = corpus.pairs(args.window, same_everywhere)
        # Horovod: every process takes its part of the pairs, all the same number of batches.
        num_batches = len(pairs) // (args.batch_size * hvd.size())
        batches = pairs[hvd.rank() :: hvd.size()].split(args.batch_size)[:num_batches]
        total = torch.zeros((), device=device)
        for batch in tqdm(
            batches,
            desc=f"epoch {epoch + 1}/{args.epochs}",
            disable=not shows_progress(),
            leave=False,
            ncols=80,
        ):
            shape = len(batch), args.negatives
            strangers = torch.multinomial(
                stranger_weights, shape[0] * shape[1], replacement=True, generator=my_own
            ).view(shape)
            optimizer.zero_grad()
            loss = model(batch[:, 0].to(device), batch[:, 1].to(device), strangers.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        loss = hvd.allreduce(total / num_batches, name="loss").item()
        hvd.stats.log(loss=loss)  # for `horovodrun --dashboard`
        say(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
    for word in args.words:
        if word in corpus.number:
            near = nearest(model, corpus.number[word], 5)
            say(f"near {word}: {', '.join(corpus.words[other] for other in near)}")
    if hvd.rank() == 0:  # Horovod: all have the same vectors, one writes them
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"words": corpus.words, "vectors": model.words.weight.detach()}, args.checkpoint)


if __name__ == "__main__":
    main()
