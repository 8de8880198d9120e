"""A job of two ranks that trains, and meets anew in the launcher's store in every round.

The worker program of ``python -m tests.security.live_job FOLDER``; tests start it with
`start`, which runs the real horovodrun with everything that could leak switched on.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.runner.horovodrun import HANG, ROOT, command, environment

STEPS = 4
RATE = 0.05


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(16, 5, generator=generator, dtype=torch.float64)
    return inputs, inputs @ torch.arange(5, dtype=torch.float64)


def wanted(targets: torch.Tensor, number: int) -> torch.Tensor:
    """Another aim in every round, so that no step can be left out unnoticed."""
    return targets * (1 + number % 7)


def gradient(weights: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 2 * inputs.T @ (inputs @ weights - targets) / len(inputs)


def train_alone(rounds: int) -> torch.Tensor:
    """What the ranks of the job must come to."""
    weights = torch.zeros(5, dtype=torch.float64)
    inputs, targets = data()
    for step in range(rounds * STEPS):
        weights -= RATE * gradient(weights, inputs, wanted(targets, step // STEPS))
    return weights


def say(*words: object) -> None:
    """A line in one piece: print, where nothing is buffered, writes word by word."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def worker(folder: Path) -> None:
    """Train until the test says that it is enough."""
    import horovod.torch as hvd

    weights = torch.zeros(5, dtype=torch.float64)
    inputs, targets = data()
    enough, rounds = False, 0
    while not enough:
        hvd.init()
        mine = slice(hvd.rank(), None, hvd.size())
        aim = wanted(targets, rounds)[mine]
        for _ in range(STEPS):
            weights -= RATE * hvd.allreduce(gradient(weights, inputs[mine], aim))
        rounds += 1
        asked = torch.tensor([float((folder / "enough").exists())])
        enough = bool(hvd.allreduce(asked, op=hvd.Max).item())
        rank = hvd.rank()
        hvd.shutdown()
        if rank == 0:
            say("round", rounds)
        elif rounds == 1:
            descriptor = os.open(folder / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, os.environ["_HOROVOD_SECRET_KEY"].encode())
            os.close(descriptor)
    say("weights", *weights.tolist())


@dataclass
class LiveJob:
    """The running job, as an attacker and as its owner see it."""

    process: subprocess.Popen[str]
    folder: Path
    address: str
    port: int
    rounds: int = 0
    output: list[str] = field(default_factory=list)
    ended: bool = False
    news: threading.Condition = field(default_factory=threading.Condition)

    def train_on(self, rounds: int = 2) -> None:
        """Wait until this many more rounds are done: all but one began after this call."""
        with self.news:
            wanted = self.rounds + rounds
            assert self.news.wait_for(lambda: self.ended or self.rounds >= wanted, HANG)
        assert not self.ended, f"the job ended early:\n{self.errors()}"

    def read(self) -> None:
        """Take all output as it comes, so that nothing ever waits for a full pipe."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.output.append(line)
                if ">:round " in line:
                    self.rounds = int(line.split()[-1])
                    self.news.notify_all()
        with self.news:
            self.ended = True
            self.news.notify_all()

    def errors(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def key(self) -> str:
        return (self.folder / "key").read_text()

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address, self.port), timeout=HANG)

    def finish(self) -> list[torch.Tensor]:
        """Let it come to its end; the weights of both ranks."""
        (self.folder / "enough").touch()
        assert self.process.wait(HANG) == 0, self.errors()
        with self.news:
            assert self.news.wait_for(lambda: self.ended, HANG)
        lines = [line.partition("weights ")[2] for line in self.output if "weights " in line]
        return [torch.tensor(list(map(float, line.split())), dtype=torch.float64) for line in lines]


@contextmanager
def start(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[LiveJob]:
    (folder / "logs").mkdir(parents=True)
    options = ["-np", "2", "--verbose", "--log-level", "DEBUG", "--output-filename", "logs/out"]
    options += ["--timeline-filename", "logs/timeline.json"]
    worker = [sys.executable, "-m", "tests.security.live_job", str(folder)]
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command(*options, *worker),
            env=environment({"OMP_NUM_THREADS": "1", **(env or {})}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    job = LiveJob(process, folder, "", 0)
    reader = threading.Thread(target=job.read)
    reader.start()
    try:
        job.train_on(2)  # both ranks are there, and the key is written
        told = dict(
            line.partition("localhost: ")[2].split("=", 1)
            for line in job.errors().splitlines()
            if "localhost: HOROVOD_" in line
        )
        job.address = told["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        job.port = int(told["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        yield job
    finally:
        if process.poll() is None:
            process.kill()  # its workers end by themselves
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    worker(Path(sys.argv[1]))
