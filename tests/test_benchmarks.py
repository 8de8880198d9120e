"""The statistics behind the README's numbers, and that a benchmark runs."""

from __future__ import annotations

import csv
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.network_calls import call_times
from benchmarks.network_promises import at_least, requirements
from benchmarks.network_report import Calls, Results, Setting, Training
from benchmarks.processes import group, limit
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
    found = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert found.returncode == 1, found.stderr  # not everything was measured
    assert "MNIST CNN, 2 ranks: at least 1.2x DDP: " in found.stdout
    with (tmp_path / "training.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"plain", "ours", "ddp"}
    assert all(float(row["median_ms"]) > 0 for row in rows.values())
    assert all(int(row["samples"]) >= 8 for row in rows.values())
    assert float(rows["ours"]["times_ours"]) == 1.0
    assert median(float(row["times_ours"]) for row in rows.values()) > 0


def test_a_call_begins_when_it_is_due_or_when_the_slowest_rank_is_free():
    ends = [[10.1, 11.1, 12.9, 13.1], [10.2, 12.5, 12.7, 13.3]]  # of two ranks, seconds
    times = call_times(10.0, 1.0, ends)
    assert times == pytest.approx([0.2e6, 1.5e6, 0.4e6, 0.3e6])


@pytest.mark.parametrize(
    ("ratio", "interval", "wanted", "expected"),
    [
        (1.04, (1.01, 1.07), 1.0, True),
        (0.99, (0.96, 1.02), 1.0, True),  # level, as far as one can tell
        (0.97, (0.95, 0.99), 1.0, False),
        (0.97, (0.70, 1.30), 1.0, None),  # one cannot tell
        (3.00, (2.00, 9.00), 1.0, True),
        (0.20, (0.10, 0.90), 1.0, False),
        (1.00, (-math.inf, math.inf), 1.0, None),
        (1.09, (1.05, 1.15), 1.1, False),
        (1.12, (1.05, 1.15), 1.1, True),
    ],
)
def test_what_counts_as_level(ratio: float, interval: tuple[float, float], wanted: float, expected):
    assert at_least(ratio, interval, wanted) is expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting(2, 1, "1gbit"), 80.0 / (1_863_690 * 32 / 1e6)),  # the link's time
        (Setting(2, 1, "10gbit"), 80.0 / 20.0),  # its own
        (Setting(2, 1), None),
        (Setting(3, 1, "1gbit"), None),
    ],
)
def test_how_much_faster_than_ddp_anybody_could_be(setting: Setting, expected: float | None):
    speed = {"mlp": {"plain": [20.0] * 5, "ddp": [80.0] * 5}}
    assert Training(2, speed, setting=setting).most("mlp") == pytest.approx(expected)


def test_promises_between_hosts():
    def judged(ours: float, small: float) -> dict[str, bool | None]:
        speed = {"mlp": {"plain": [1.0] * 20, "ours": [ours] * 20, "ddp": [2.0] * 20}}
        same = {"mlp": {"ours": [[2.3, 2.2]], "ddp": [[2.3, 2.2 if ours < 2 else 2.1]]}}
        setting = Setting(2, 1, "10gbit")
        calls = Calls(Setting(2, 1))
        calls.samples = {
            4: {"ours": [small] * 20, "gloo": [500.0] * 20},
            1 << 20: {"ours": [1000.0] * 20, "gloo": [1000.0] * 20},
        }
        results = Results([Training(2, speed, same, setting=setting)], [calls])
        return {one.text: one.met for one in requirements(results, [setting])}

    mlp = "MLP 784-1024-1024-10, 2 hosts"
    trained = f"{mlp}, 1 rank each, 10gbit link: at least 1.0x DDP"
    losses = f"{mlp}: losses bitwise equal to DDP's"
    level = "allreduce, 2 hosts, 1 rank each, unlimited link: never slower than torch's Gloo"
    twice = level.replace("never slower than", "at least 2x") + " up to 64 KiB"
    good, poor, bad = judged(1.9, 200.0), judged(1.9, 400.0), judged(2.1, 600.0)
    for text, expected in {
        trained: [True, True, False],
        losses: [True, True, False],
        level: [True, True, False],
        twice: [True, False, False],
        trained.replace("10gbit", "1gbit"): [None, None, None],
    }.items():
        assert [found[text] for found in (good, poor, bad)] == expected, text


ANSWERING = "import sys; print(0, flush=True); sys.stdin.readline(); print(0, flush=True)"
FAILING = "import sys; print(0, flush=True); sys.stdin.readline(); sys.exit('out of ink')"
STUCK = "import sys; print(0, flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (FAILING, "a race ended: rank 1 with status 1. What its ranks printed:\n\nrank 1:\nout of"),
        (STUCK, "a race took too long: no answer from rank 0, 1. What"),
    ],
)
def test_a_rank_that_does_not_answer_is_named(tmp_path: Path, second: str, said: str):
    programs = [STUCK, second, ANSWERING]
    commands = [([sys.executable, "-c", program], dict(os.environ)) for program in programs]
    seconds = 200 if second == FAILING else 10
    with (
        pytest.raises(SystemExit, match=said),
        group(commands, tmp_path / "a race") as job,
        limit(seconds),  # not of starting them
    ):
        job.ask("go")


def test_hosts_are_compared(tmp_path: Path):
    program = [sys.executable, str(ROOT / "benchmarks" / "network.py"), "--check", "--loopback"]
    program += ["--sections", "allreduce", "--sizes", "4,64K", "--call-seconds", "1"]
    found = subprocess.run(
        [*program, "--output", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 1, found.stderr  # not everything was measured
    assert "hosts are only names" in found.stdout
    with (tmp_path / "network.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["item"], row["contender"]) for row in rows] == [
        (size, contender) for size in ("4", "65536") for contender in ("ours", "gloo")
    ]
    assert all(float(row["median_ms"]) > 0 and int(row["samples"]) >= 8 for row in rows)


def test_the_cost_of_statistics_is_measured():
    program = [sys.executable, str(ROOT / "benchmarks" / "stats.py"), "--np", "1"]
    options = ["--seconds", "0.2", "--models", "mlp"]
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("allreduce of 1 KiB", "MLP 784-1024-1024-10"):
        assert re.search(
            rf"{line} +[\d.]+ [um]s +[\d.]+ +\S+ to \S+ +[\d.]+ us +[\d.]+ %", done.stdout
        )
    assert "counting takes under 0.5 % of a step" in done.stdout
