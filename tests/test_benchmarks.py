"""The statistics behind the README's numbers, and that a benchmark runs."""

from __future__ import annotations

import csv
import math
import random
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training_report import Run, table
from benchmarks.turns import doubt, interval, ratios

ROOT = Path(__file__).resolve().parent.parent


def run_of(plain: list[float], ours: list[float], ddp: list[float]) -> Run:
    return Run(2, {"mlp": {"plain": plain, "ours": ours, "ddp": ddp}})


@given(st.lists(st.floats(0.5, 50.0), min_size=8, max_size=60))
def test_what_slows_the_machine_down_is_not_in_the_ratio(slowness: list[float]):
    run = run_of(slowness, [2 * slow for slow in slowness], [3 * slow for slow in slowness])
    assert run.ratio("mlp", "ddp", "ours") == pytest.approx(1.5)
    assert run.ratio("mlp", "plain", "ours") == pytest.approx(0.5)
    assert run.doubt("mlp", "ddp", "ours") == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("count", range(30))
def test_few_rounds_leave_every_doubt(count: int):
    assert (doubt([1.0] * count) == math.inf) == (count < 8)


@pytest.mark.parametrize("count", [10, 40, 150])
def test_the_true_median_is_within_doubt_nineteen_times_out_of_twenty(count: int):
    generator = random.Random(count)
    hits, trials = 0, 1000
    for _ in range(trials):
        values = sorted(generator.lognormvariate(0.3, 0.5) for _ in range(count))
        reach = 0.98 * math.sqrt(count)
        low, high = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
        assert interval(values) == (values[low], values[high])
        assert doubt(values) == (values[high] - values[low]) / 2
        hits += values[low] <= math.exp(0.3) <= values[high]
    assert 0.93 <= hits / trials <= 0.995


def test_rounds_are_paired_in_the_order_in_which_they_were():
    assert ratios({"ours": [1.0, 2.0], "ddp": [3.0, 8.0]}, "ddp", "ours") == [3.0, 4.0]


def test_the_table_says_that_a_machine_was_not_idle():
    quiet = run_of([10.0] * 20, [11.0] * 20, [20.0] * 20)
    assert "not idle" not in table(quiet, "cpu")
    assert "1.82x +-0.00" in table(quiet, "cpu")
    busy = run_of([10.0, 15.0] * 10, [11.0, 16.0] * 10, [20.0, 30.0] * 10)
    assert "not idle" in table(busy, "cpu")


def test_training_is_compared(tmp_path: Path):
    program = [sys.executable, str(ROOT / "benchmarks" / "training.py"), "--check"]
    program += ["--np", "2", "--models", "cnn", "--only-speed", "--seconds", "1"]
    program += ["--output", str(tmp_path)]
    found = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1, found.stderr  # not everything was measured
    assert "MNIST CNN, 2 ranks: at least 1.2x DDP: " in found.stdout
    with (tmp_path / "training.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"plain", "ours", "ddp"}
    assert all(float(row["median_ms"]) > 0 for row in rows.values())
    assert all(int(row["samples"]) >= 8 for row in rows.values())
    assert float(rows["ours"]["times_ours"]) == 1.0
    assert median(float(row["times_ours"]) for row in rows.values()) > 0
