#!/usr/bin/env python
"""How fast and in how much memory a TorchEstimator trains, against a TorchDistributor program.

    python benchmarks/spark_reading.py                  # three turns of each, one after the other
    python benchmarks/spark_reading.py --rows 2000000   # data of 0.8 GB; memory must not follow it

Both train the same linear model on two executors, from the same Parquet files of rows with 100
floats, in batches of the same size. The TorchDistributor program is what people write there:
DistributedDataParallel, and each rank reads its files with pyarrow and shuffles each batch. Rows
per second are those of the last epoch, of both ranks together; processor time is that of all their
threads in that epoch, which says more where other programs use the machine too; memory is the peak
(VmHWM) of the rank that needs more.

``--limit MIB`` lets each rank have only so much memory for data (RLIMIT_DATA), so that
a rank which keeps the data fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

from benchmarks.promises import Requirement, all_met, warn_if_busy  # noqa: E402
from benchmarks.spark import EXECUTORS, make_session  # noqa: E402

FLOATS = 100
FILES = 8


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000, help="of the data (400,000)")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows of a batch (1024)")
    parser.add_argument("--epochs", type=int, default=2, help="of each turn; the last counts (2)")
    parser.add_argument("--turns", type=int, default=3, help="of each contender (3)")
    parser.add_argument("--limit", type=int, help="MiB of data that a process may have")
    parser.add_argument("--only", choices=("TorchEstimator", "TorchDistributor"))
    parser.add_argument("--check", action="store_true", help="fail if a promise does not hold")
    return parser.parse_args(arguments)


def write(folder: Path, rows: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as parquet

    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(FILES):
        count = rows // FILES
        values = pa.array(random.normal(size=count * FLOATS).astype(np.float32))
        features = pa.FixedSizeListArray.from_arrays(values, FLOATS).cast(pa.list_(pa.float32()))
        table = pa.table({"x": features, "y": random.normal(size=count).astype(np.float32)})
        parquet.write_table(table, folder / f"part-{number:05}.parquet", compression="snappy")


def peak_memory() -> float:
    """The peak memory of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(status["VmHWM"].split()[0]) / 1024


def limit_memory(mebibytes: int | None) -> None:
    if mebibytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (mebibytes << 20, mebibytes << 20))


class Clock:
    """A callback that notes the times of the last epoch and the peak memory in a file."""

    def __init__(self, folder: str, limit: int | None) -> None:
        self._folder = folder
        self._limit = limit
        self._begin = self._end = (0.0, 0.0)

    def on_train_begin(self, logs: Any = None) -> None:
        limit_memory(self._limit)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin = (time.perf_counter(), time.process_time())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end = (time.perf_counter(), time.process_time())

    def on_train_end(self, logs: Any = None) -> None:
        file = Path(self._folder, f"{os.getpid()}.txt")
        wall, processor = (e - b for e, b in zip(self._end, self._begin, strict=True))
        file.write_text(f"{wall} {processor} {peak_memory()}")


def notes(folder: Path) -> tuple[float, float, float]:
    """The seconds of the slowest rank, the processor time of all, and the peak of the largest."""
    found = [tuple(map(float, file.read_text().split())) for file in folder.glob("*.txt")]
    assert len(found) == EXECUTORS, found
    wall, processor, peak = zip(*found, strict=True)
    return max(wall), sum(processor), max(peak)


def estimate(data: Path, folder: Path, options: argparse.Namespace) -> None:
    import torch

    from horovod.spark.common.store import Store
    from horovod.spark.torch import TorchEstimator

    model = torch.nn.Linear(FLOATS, 1)
    TorchEstimator(
        num_proc=EXECUTORS,
        store=Store.create(str(folder), train_path=str(data), save_runs=False),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.001),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=[Clock(str(folder), options.limit)],
        verbose=0,
    ).fit_on_parquet()


def distribute(data: Path, folder: Path, options: argparse.Namespace) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=EXECUTORS, local_mode=False, use_gpu=False)
    arguments = (str(data), str(folder), options.batch_size, options.epochs, options.limit)
    distributor.run(train_with_ddp, *arguments)


def train_with_ddp(data: str, folder: str, batch_size: int, epochs: int, limit: int | None) -> None:
    """What each rank of the TorchDistributor program does."""
    import pyarrow.parquet as parquet
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(FLOATS, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    files = sorted(Path(data).glob("*.parquet"))[rank::size]
    clock = Clock(folder, limit)
    clock.on_train_begin()
    for epoch in range(epochs):
        clock.on_epoch_begin(epoch)
        for file in files:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size):
                values = batch.column("x").flatten().to_numpy()
                x = torch.from_numpy(values.reshape(-1, FLOATS).copy())
                y = torch.from_numpy(batch.column("y").to_numpy().copy()).reshape(-1, 1)
                order = torch.randperm(len(x))
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x[order]), y[order]).backward()
                optimizer.step()
        clock.on_epoch_end(epoch)
    clock.on_train_end()
    dist.destroy_process_group()


CONTENDERS: dict[str, Callable[[Path, Path, argparse.Namespace], None]] = {
    "TorchDistributor": distribute,
    "TorchEstimator": estimate,
}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    make_session()
    names = [options.only] if options.only else list(CONTENDERS)
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        write(data, options.rows)
        for turn in range(options.turns):
            for name in names if turn % 2 == 0 else reversed(names):
                folder = Path(temporary) / f"{name}-{turn}"
                folder.mkdir()
                CONTENDERS[name](data, folder, options)
                seconds, processor, peak = notes(folder)
                samples[name].append((seconds, processor, peak))
                print(
                    f"turn {turn + 1}: {name:16} {options.rows / seconds:10,.0f} rows per second, "
                    f"{options.rows / processor:10,.0f} per processor second, peak {peak:6.0f} MiB",
                    flush=True,
                )
    if options.only:
        return 0
    pairs = list(zip(samples["TorchDistributor"], samples["TorchEstimator"], strict=True))
    speed = median(theirs[0] / ours[0] for theirs, ours in pairs)
    processor = median(theirs[1] / ours[1] for theirs, ours in pairs)
    memory = median(ours[2] / theirs[2] for theirs, ours in pairs)
    print(
        f"TorchEstimator / TorchDistributor: {speed:.2f}x the rows, {processor:.2f}x the rows of a "
        f"processor second, {memory:.2f}x the memory"
    )
    met = all_met(
        [
            Requirement("twice TorchDistributor's rows a second", speed >= 2, f"{speed:.2f}x"),
            Requirement("no more memory than TorchDistributor", memory <= 1, f"{memory:.2f}x"),
        ]
    )
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
