#!/usr/bin/env python
"""How fast a rank reads for the Spark estimators: against plain pyarrow and tensors in memory.

Run by people, and with --check by whoever guards the project's promises. No Spark is needed: what
a rank reads is Parquet.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch are there

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"),
]

import numpy as np  # noqa: E402

from benchmarks.promises import Requirement, all_met, times_text, warn_if_busy  # noqa: E402
from benchmarks.turns import doubt, race, ratios  # noqa: E402

BATCH = 1024  # rows; both sides give batches of this size
WIDE_ROWS, WIDE_COLUMNS = 200_000, 100
IMAGE_ROWS, IMAGE = 4_000, 3 * 32 * 32
TABLE_ROWS, TABLE_BATCH = 100_000, 256
BUFFER = 20_000  # rows to shuffle among
GROWTH = 4  # how much more data the second measurement of memory reads
PROCESSES = 5  # for each peak: it differs by some percent, as threads and malloc have it

DESCRIPTION = """\
Rows per second that a rank reads, shuffled and in batches of 1024, against the same batches in
order by plain pyarrow: 100 columns of float32, and images as arrays. Peak memory of a process that
reads the data, and four times the data. And the steps per second of the tabular example, from
Parquet and from tensors in memory.

Contenders take turns in one process; OMP_NUM_THREADS is 1. Ratios are of turns that follow each
other.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, for each ratio")
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows, for a quick look")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise is broken")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# -- data -----------------------------------------------------------------------------------------


def write(folder: Path, make: Callable[[int, Any], dict[str, Any]], rows: int, files: int) -> str:
    """Parquet as Spark would write it: several files of one row group, compressed with snappy."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(files):
        table = pa.table(make(rows // files, random))
        parquet.write_table(table, folder / f"part-{number:05}.parquet", compression="snappy")
    return str(folder)


def wide(rows: int, random: Any) -> dict[str, Any]:
    return {f"f{n}": random.normal(size=rows).astype(np.float32) for n in range(WIDE_COLUMNS)}


def images(rows: int, random: Any) -> dict[str, Any]:
    import pyarrow as pa

    values = pa.array(random.normal(size=rows * IMAGE).astype(np.float32))
    column = pa.FixedSizeListArray.from_arrays(values, IMAGE).cast(pa.list_(pa.float32()))
    return {"image": column, "label": random.integers(0, 10, rows)}


CATEGORIES = {"shop": 1000, "weekday": 7, "promo": 2, "kind": 5, "holiday": 4, "month": 12}
NUMBERS = ["distance", "temperature", "rain", "wind"]


def table(rows: int, random: Any) -> dict[str, Any]:
    columns = {name: random.integers(0, size, rows) for name, size in CATEGORIES.items()}
    columns |= {name: random.normal(size=rows).astype(np.float32) for name in NUMBERS}
    columns["sales"] = random.normal(size=rows).astype(np.float32)
    return columns


# -- reading --------------------------------------------------------------------------------------


def read_plain(path: str) -> int:
    """The batches of plain pyarrow, as numpy arrays."""
    import pyarrow as pa
    import pyarrow.dataset

    rows = 0
    for batch in pyarrow.dataset.dataset(path, format="parquet").to_batches(batch_size=BATCH):
        for column in batch.columns:
            values = column.flatten() if pa.types.is_list(column.type) else column
            values.to_numpy(zero_copy_only=False)
        rows += batch.num_rows
    return rows


def read_ours(path: str, capacity: int) -> int:
    """The batches of our reader, shuffled, as numpy arrays."""
    from horovod.spark.common.reading.batches import batches
    from horovod.spark.common.reading.reader import ParquetReader

    rows = 0
    with ParquetReader(path, shuffle_row_groups=True) as reader:
        for batch in batches(reader.passes(), BATCH, capacity=min(capacity, reader.num_rows)):
            rows += len(next(iter(batch.values())))
    return rows


def timed(function: Callable[[], Any]) -> Callable[[], float]:
    def turn() -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return turn


def reading(path: str, capacity: int, rows: int, seconds: float) -> tuple[float, float]:
    """Our rows per second over pyarrow's, and the doubt."""
    contenders = {"plain": lambda: read_plain(path), "ours": lambda: read_ours(path, capacity)}
    for function in contenders.values():
        function()
    samples = race({n: timed(f) for n, f in contenders.items()}, [("plain", "ours")], seconds)
    for name, times in samples.items():
        print(f"  {name:6} {rows / median(times):12,.0f} rows per second")
    found = ratios(samples, "plain", "ours")
    return median(found), doubt(found)


def peak_of(path: str, capacity: int) -> float:
    """The peak memory, in MiB, of a process that reads the data twice; the median of several."""
    command = [sys.executable, __file__, "--memory-of", f"{capacity}:{path}"]
    found = []
    for _ in range(PROCESSES):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(float(done.stdout))
    return median(found)


def tell_peak(argument: str) -> None:
    from horovod.spark.common.job import use_system_memory

    capacity, _, path = argument.partition(":")
    use_system_memory()
    for _ in range(2):
        read_ours(path, int(capacity))
    # Not ru_maxrss: it begins with the memory of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) / 1024)


# -- training -------------------------------------------------------------------------------------


def training(path: str, rows: int, seconds: float) -> tuple[float, float]:
    """Our steps per second over those from memory, and the doubt."""
    import torch

    from horovod.spark.torch.datamodule import PetastormDataModule
    from horovod.spark.torch.feeding import as_input

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _model(torch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = max(1, rows // TABLE_BATCH // 4)
    features = [*CATEGORIES, *NUMBERS]

    def step(inputs: list[Any], label: Any) -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.smooth_l1_loss(model(*inputs).reshape(-1), label)
        loss.backward()
        optimizer.step()

    data = table(rows, np.random.default_rng(0))
    memory = {name: torch.from_numpy(column) for name, column in data.items()}
    memory = {n: (t.long() if n in CATEGORIES else t.float()) for n, t in memory.items()}

    def from_memory() -> None:
        order = torch.randperm(rows)
        for number in range(steps):
            chosen = order[number * TABLE_BATCH : (number + 1) * TABLE_BATCH]
            step([memory[name][chosen] for name in features], memory["sales"][chosen])

    with PetastormDataModule(
        path,
        "",
        has_val=False,
        train_batch_size=TABLE_BATCH,
        shuffle_capacity=BUFFER,
        steps_per_epoch_train=steps,
    ) as module:
        loader = module.train_data()

        def from_parquet() -> None:
            for batch in loader:
                inputs = [as_input(batch[n], None, n in CATEGORIES) for n in features]
                step(inputs, batch["sales"].float())

        contenders = {"memory": from_memory, "ours": from_parquet}
        for function in contenders.values():
            function()
        samples = race({n: timed(f) for n, f in contenders.items()}, [("memory", "ours")], seconds)
    for name, times in samples.items():
        print(f"  {name:6} {steps / median(times):12,.1f} steps per second")
    found = ratios(samples, "memory", "ours")
    return median(found), doubt(found)


def _model(torch: Any) -> Any:
    """The model of examples/spark/pytorch/pytorch_spark_rossmann.py, with larger tables."""

    class Sales(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            widths = [min(16, size // 2 + 1) for size in CATEGORIES.values()]
            self.embeddings = torch.nn.ModuleList(
                [
                    torch.nn.Embedding(size, width)
                    for size, width in zip(CATEGORIES.values(), widths, strict=True)
                ]
            )
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(sum(widths) + len(NUMBERS), 64),
                torch.nn.ReLU(),
                torch.nn.Linear(64, 32),
                torch.nn.ReLU(),
                torch.nn.Linear(32, 1),
            )

        def forward(self, *columns: Any) -> Any:
            found = [e(c) for e, c in zip(self.embeddings, columns, strict=False)]
            numbers = [column.reshape(-1, 1) for column in columns[len(self.embeddings) :]]
            return self.layers(torch.cat([*found, *numbers], 1))

    return Sales()


def requirements(found: dict[str, float]) -> Iterator[Requirement]:
    for name in ("100 columns", "images", "tabular training"):
        yield Requirement(f"{name}: at least 0.8x", found[name] >= 0.8, times_text(found[name]))
    yield Requirement(
        f"{GROWTH}x the data: at most 1.1x the memory",
        found["memory"] <= 1.1,
        times_text(found["memory"]),
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.memory_of:
        tell_peak(options.memory_of)
        return 0
    warn_if_busy()
    from horovod.spark.common.job import use_system_memory

    use_system_memory()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, scale = Path(name), options.scale
        for title, make, rows, capacity in (
            ("100 columns", wide, int(WIDE_ROWS * scale), BUFFER),
            ("images", images, int(IMAGE_ROWS * scale), BUFFER // 10),
        ):
            path = write(folder / title.replace(" ", "_"), make, rows, 8)
            print(f"{title}: {rows:,} rows")
            found[title], half = reading(path, capacity, rows, options.seconds)
            print(f"  ratio  {found[title]:.2f} +- {half:.2f}")
        rows = int(WIDE_ROWS * scale)
        small = peak_of(str(folder / "100_columns"), int(BUFFER * scale))
        large_path = write(folder / "larger", wide, rows * GROWTH, 8 * GROWTH)
        large = peak_of(large_path, int(BUFFER * scale))
        found["memory"] = large / small
        print(f"peak memory: {small:.0f} MiB for the data, {large:.0f} MiB for {GROWTH}x the data")
        rows = int(TABLE_ROWS * scale)
        path = write(folder / "table", table, rows, 8)
        print(f"tabular training: {rows:,} rows, batches of {TABLE_BATCH}")
        found["tabular training"], half = training(path, rows, options.seconds)
        print(f"  ratio  {found['tabular training']:.2f} +- {half:.2f}")
    met = all_met(requirements(found))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
