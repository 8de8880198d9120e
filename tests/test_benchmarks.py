"""The statistics behind the README's numbers, and that a benchmark runs."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import collectives, collectives_report, elastic, training, training_options
from benchmarks import compile as compile_benchmark
from benchmarks.elastic_journals import Journals
from benchmarks.gpus import MPS_CONTROL, Gpus, gpus_for
from benchmarks.named_hosts import host_counts
from benchmarks.network_calls import call_times
from benchmarks.network_promises import at_least, requirements
from benchmarks.network_report import Calls, Results, Setting, Training
from benchmarks.parts import Parts
from benchmarks.processes import JobFailed, group, limit, torchrun_environments
from benchmarks.training_models import WORKLOADS
from benchmarks.training_promises import level
from benchmarks.training_promises import requirements as training_requirements
from benchmarks.training_report import Run, table
from benchmarks.turns import doubt, interval, race, ratios
from horovod.common.environments import detect
from horovod.common.topology import Topology
from tests.forked_python import forked_python

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


def test_a_race_ends_before_its_deadline_with_what_it_has():
    turns = {"ours": lambda: 1.0, "ddp": lambda: 2.0}
    found = race(turns, [("ddp", "ours")], 60.0, deadline=time.monotonic() - 1)
    assert found == {"ours": [1.0], "ddp": [2.0]}
    assert len(race(turns, [("ddp", "ours")], 60.0)["ours"]) == 8


def test_the_table_says_that_a_machine_was_not_idle():
    quiet = run_of([10.0] * 20, [11.0] * 20, [20.0] * 20)
    assert "not idle" not in table(quiet, "cpu")
    assert "1.82x +-0.00" in table(quiet, "cpu")
    busy = run_of([10.0, 15.0] * 10, [11.0, 16.0] * 10, [20.0, 30.0] * 10)
    assert "not idle" in table(busy, "cpu")


def test_training_is_compared(tmp_path: Path):
    program = [*forked_python(), str(ROOT / "benchmarks" / "training.py"), "--check"]
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
    program = [*forked_python(), str(ROOT / "benchmarks" / "network.py"), "--check", "--loopback"]
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


def test_quality_with_local_steps_is_compared(tmp_path: Path):
    program = [*forked_python(), str(ROOT / "benchmarks" / "local_quality.py")]
    sizes = "--steps 12 --layers 1 --width 64 --context 32 --batch 2 --local-steps 2"
    chosen = "--seeds 0 --configurations every fp8 --parallel 2"
    result, picture = tmp_path / "curves.json", tmp_path / "curves.svg"
    given = [*sizes.split(), *chosen.split(), "--json", str(result)]
    found = subprocess.run([*program, *given], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    runs = {run["configuration"]: run for run in json.loads(result.read_text())["runs"]}
    assert set(runs) == {"every", "fp8"}
    for run in runs.values():
        steps, losses = zip(*run["curve"], strict=True)
        assert steps == (2, 4, 6, 8, 10, 12)
        assert losses[-1] < losses[0] < 7  # ln 256 = 5.5, before anything is learned
    drawn = [*program, "--plot", str(picture), str(result)]
    found = subprocess.run(drawn, capture_output=True, text=True, timeout=60)
    assert "local steps, fp8" in found.stdout
    assert picture.read_text().count("<polyline") == 2


def test_local_steps_are_measured(tmp_path: Path):
    program = [*forked_python(), str(ROOT / "benchmarks" / "local_steps.py"), "--loopback"]
    program += ["--models", "cnn", "--contenders", "local fp8", "--local-steps", "2"]
    program += ["--rounds", "1", "--sizes", "300000", "--tasks", "digits", "--steps", "6"]
    program += ["--seeds", "1", "--output", str(tmp_path)]
    found = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    with (tmp_path / "local_steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["section"], row["contender"]) for row in rows} == {
        ("speed", "local fp8"),
        *(("allreduce", name) for name in ("none", "bf16", "fp8", "int8")),
        ("quality", "local fp8"),
    }
    assert all(float(row["ms"] or row["loss"]) > 0 for row in rows)


def test_the_cost_of_statistics_is_measured():
    program = [*forked_python(), str(ROOT / "benchmarks" / "stats.py"), "--np", "1"]
    options = ["--seconds", "0.2", "--models", "mlp"]
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("allreduce of 1 KiB", "MLP 784-1024-1024-10"):
        assert re.search(
            rf"{line} +[\d.]+ [um]s +[\d.]+ +\S+ to \S+ +[\d.]+ us +[\d.]+ %", done.stdout
        )
    assert "counting takes under 0.5 % of a step" in done.stdout


# -- on GPUs, as far as that can be tried without one ------------------------------------------

H200 = Gpus("NVIDIA H200", 1)


@pytest.mark.parametrize("interface", [None, "eth1"])
def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl(
    monkeypatch: pytest.MonkeyPatch, interface: str | None
):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", interface)
    given = {"NCCL_HOSTID": "rank1", "NCCL_SOCKET_IFNAME": interface or "lo"}
    assert H200.variables(1, 2) == given
    assert Gpus("NVIDIA H200", 1, {"MPS": "there"}).variables(1, 2) == {**given, "MPS": "there"}
    assert H200.variables(0, 1) == {}
    assert Gpus("NVIDIA H200", 4).variables(1, 4) == {}
    assert Gpus().variables(1, 2) == {}


def test_ranks_on_hosts_that_are_only_names():
    environments = torchrun_environments(4, 1)
    assert [environ["HOROVOD_HOSTNAME"] for environ in environments] == [
        "host0",
        "host1",
        "host2",
        "host3",
    ]
    places = [detect(environ).topology() for environ in environments]
    assert places == [Topology(rank, 4, 0, 1, rank, 4) for rank in range(4)]
    together = torchrun_environments(2)
    assert all("HOROVOD_HOSTNAME" not in environ for environ in together)
    assert [detect(environ).topology().local_rank for environ in together] == [0, 1]


MPS_PROGRAM = """#!/bin/sh
echo "$@ $CUDA_MPS_PIPE_DIRECTORY $(test "$1" || cat)" >> {log}
test -d "$CUDA_MPS_PIPE_DIRECTORY" && test -d "$CUDA_MPS_LOG_DIRECTORY" && exit {status}
"""


def as_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, status: int) -> Path:
    """One GPU and MPS, which are not there; the file is what MPS was told."""
    program, log = folder / MPS_CONTROL, folder / "log"
    program.write_text(MPS_PROGRAM.format(log=log, status=status))
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("benchmarks.gpus.gpu_name", lambda: "NVIDIA H200")
    return log


def test_mps_runs_while_ranks_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = as_on_a_gpu_machine(monkeypatch, tmp_path, 0)
    with gpus_for("cuda", 4, True) as gpus:
        pipes = gpus.variables(3, 4)["CUDA_MPS_PIPE_DIRECTORY"]
        assert log.read_text() == f"-d {pipes} \n"
    assert log.read_text() == f"-d {pipes} \n {pipes} quit -t 5\n"
    assert not Path(pipes).exists()
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "1 x NVIDIA H200, up to 4 ranks: they share" in said
    assert "MPS started" in said


@pytest.mark.parametrize(
    ("device", "most_ranks", "with_mps", "status", "said"),
    [
        ("cpu", 4, True, 0, ""),
        ("cuda", 1, True, 0, "a GPU each"),
        ("cuda", 2, False, 0, "no MPS, as asked"),
        ("cuda", 2, True, 3, "no MPS, because it does not start (status 3)"),
    ],
)
def test_without_mps(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    device: str,
    most_ranks: int,
    with_mps: bool,
    status: int,
    said: str,
):
    log = as_on_a_gpu_machine(monkeypatch, tmp_path, status)
    with gpus_for(device, most_ranks, with_mps) as gpus:
        assert "CUDA_MPS_PIPE_DIRECTORY" not in gpus.variables(1, 2)
    assert "quit" not in log.read_text()
    assert said in capsys.readouterr().out


def test_what_is_trained_on_gpus():
    options = training_options.parse(["--device", "cuda", "--np", "1", "2", "4"])
    assert training_options.models_of(options, 1) == ["resnet50", "gpt2"]
    assert training_options.models_of(options, 4) == ["resnet50", "gpt"]
    assert host_counts(options, 1) == [1]
    assert host_counts(options, 4) == [4, 1]
    assert options.contenders == ["plain", "ours", "ddp"]
    assert (options.seconds, options.timeout, options.percent) == (30.0, 180.0, 1.0)
    chosen = ["--device", "cuda", "--hosts", "one", "--models", "gpt", "--seconds", "5"]
    options = training_options.parse([*chosen, "--contenders", "ours_next", "ddp"])
    assert host_counts(options, 2) == [1]
    assert training.duels(options.contenders) == [("ddp", "ours_next")]
    usual = training_options.parse([])
    assert host_counts(usual, 2) == [1]
    assert (usual.seconds, usual.timeout, usual.percent) == (120.0, 900.0, 1.5)
    assert training_options.models_of(usual, 2) == training_options.CPU_MODELS


def test_the_six_layer_gpt():
    model = WORKLOADS["gpt"].model()
    assert len(model.layers.layers) == 6
    tokens, targets = WORKLOADS["gpt"].batch(torch.Generator())
    assert (tokens.shape, targets.shape) == ((8, 512), (4096,))


def test_a_part_that_fails_does_not_lose_the_others(capsys: pytest.CaptureFixture[str]):
    def fail(seconds: float) -> int:
        raise JobFailed("rank 1 ran out of ink")

    parts = Parts(20.0, 100.0)
    assert parts.attempt("first", fail) is None
    assert parts.attempt("second", lambda seconds: seconds) == 20.0
    late = Parts(20.0, 1.0)
    assert late.attempt("third", fail) is None
    parts.explain()
    late.explain()
    said = capsys.readouterr()
    assert "rank 1 ran out of ink" in said.err
    assert "third: left out, the 1 s of --limit are over" in said.out
    assert said.out.endswith("Failed or left out: first\nFailed or left out: third\n")
    with pytest.raises(SystemExit, match="143"):  # told to end, which is no failure
        parts.attempt("fourth", lambda seconds: sys.exit(143))


RANK_WITHOUT_A_GPU = """
import json, os, sys
plan, rank = json.loads(sys.argv[1]), os.environ["RANK"]
contender = plan["contender"]
assert os.environ["NCCL_HOSTID"] == "rank" + rank
assert (os.environ["LOCAL_RANK"] == "0") == (rank == "0" or "HOROVOD_HOSTNAME" in os.environ)
if plan["model"] == "gpt" and contender == "ddp" or contender == "ours_next":
    sys.exit("out of ink" if rank == "1" else sys.stdin.read())
if plan["section"] == "losses":
    with open(f"{plan['result']}.{rank}", "w") as file:
        file.write("[2.3, 2.2]")
    sys.exit()
print('"ready"', flush=True)
for line in sys.stdin:
    values = [800, 900, 901] if json.loads(line) == "memory" else [10.0, 20.0, 20.4]
    print(values[["plain", "ours", "ddp"].index(contender)], flush=True)
"""


def test_training_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program = tmp_path / "rank.py"
    program.write_text(RANK_WITHOUT_A_GPU)
    real = training.jobs
    monkeypatch.setattr(
        training, "jobs", lambda *args: dataclasses.replace(real(*args), program=(str(program),))
    )
    options = training_options.parse(["--device", "cuda", "--np", "2"])
    options.contenders = ["plain", "ours", "ours_next", "ddp"]
    bench = training.Bench(options, H200)
    bench.measure(2, 2, True)
    bench.measure(2, 1, False)
    said = capsys.readouterr()
    ratio = "1.02x (1.02 to 1.02)"
    assert "2 ranks on 2 hosts, ResNet-50: no communication 10.00, Horovod 20.00" in said.out
    assert said.out.count(f"DDP / ours {ratio}") == 2
    assert "2 ranks on 2 hosts, cuda (NVIDIA H200), milliseconds per step (median)" in said.out
    assert "speed of gpt, DDP ended: rank" in said.err
    assert "out of ink" in said.err
    assert bench.parts.missing == [
        "2 ranks on 2 hosts, speed of resnet50, Horovod, next forward",
        "2 ranks on 2 hosts, speed of gpt, Horovod, next forward",
        "2 ranks on 2 hosts, speed of gpt, DDP",
        "2 ranks on 2 hosts, losses of gpt",
        "2 ranks, speed of resnet50, Horovod, next forward",
        "2 ranks, speed of gpt, Horovod, next forward",
        "2 ranks, speed of gpt, DDP",
    ]
    assert "2 ranks, GPT (6 layers, 768): no communication 10.00, Horovod 20.00, DDP -" in said.out
    found = {one.text: one for one in training_requirements(bench.results, "cuda")}
    several = found[
        "ResNet-50, 2 ranks on 2 hosts: Horovod at least 1.00x DDP, no interval below 0.97"
    ]
    assert (several.met, several.found) == (True, ratio)
    assert found["ResNet-50, 2 ranks: Horovod at least 1.00x DDP"].met
    assert (
        found["ResNet-50, 2 ranks: peak memory no more than DDP's"].found == "900 MiB against 901"
    )
    assert found["ResNet-50, 2 ranks on 2 hosts: losses bitwise equal to DDP's"].met
    assert found["GPT (6 layers, 768), 2 ranks: Horovod at least 1.00x DDP"].met is None
    assert found["ResNet-50, 1 rank: within 1 % of the plain optimizer"].met is None
    assert len(found) == 8 + 2 + 1 + 4 + 2


@pytest.mark.parametrize(
    ("hosts", "theirs", "expected"),
    [
        (1, [1.0] * 20, True),
        (1, [0.996] * 20, True),  # printed as 1.00
        (1, [0.99] * 20, False),
        (1, [1.1] * 5, None),  # too few turns to tell
        (2, [1.1] * 20, True),
        (2, [1.1] * 11 + [0.9] * 9, False),  # the interval begins below 0.97
        (1, [1.1] * 11 + [0.9] * 9, True),
    ],
)
def test_what_counts_as_level_on_gpus(hosts: int, theirs: list[float], expected: bool | None):
    speed = {"gpt": {"ours": [1.0] * len(theirs), "ddp": theirs}}
    run = Run(2, speed, hosts=hosts, gpu="NVIDIA H200")
    assert level(run, "gpt", "ddp", "ours").met is expected
    assert "not idle" not in table(run, "cuda")  # nobody was without communication


def test_promises_of_collectives_on_gpus():
    def judged(small: float, large: float) -> list[tuple[bool | None, str]]:
        samples = {
            4: {"ours": [small] * 11, "nccl": [400.0] * 11},
            1 << 20: {"ours": [1000.0] * 11, "nccl": [large] * 11},
        }
        run = collectives_report.Run(2, {"nccl": collectives_report.Duel(samples, {})}, 2, "H200")
        assert "1,000 small" not in collectives_report.table(run)
        assert collectives_report.table(run).startswith("2 ranks on 2 hosts, H200, float32 sum")
        promised = collectives_report.requirements(collectives_report.Results([run]), "cuda")
        return [(one.met, one.found) for one in promised]

    assert judged(500.0, 980.0) == [(True, "1.25x"), (True, "lowest 0.98x at 1 MiB")]
    assert judged(540.0, 960.0) == [(False, "1.35x"), (False, "lowest 0.96x at 1 MiB")]
    nothing = list(collectives_report.requirements(collectives_report.Results(), "cuda"))
    assert [one.met for one in nothing] == [None, None]


def test_sizes_of_collectives_depend_on_the_device():
    options = collectives.parse(["--device", "cuda"])
    assert options.sizes == [4, 1 << 20, 100 << 20]
    assert host_counts(options, 2) == [2, 1]
    assert len(collectives.parse([]).sizes) == 11


def test_collectives_are_compared(tmp_path: Path):
    program = [*forked_python(), str(ROOT / "benchmarks" / "collectives.py"), "--np", "2"]
    program += ["--sizes", "4,64K", "--seconds", "0.2", "--only-allreduce", "--no-mpi"]
    program += ["--no-many", "--hosts", "several", "--output", str(tmp_path)]
    found = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "2 ranks on 2 hosts, float32 sum in place" in found.stdout
    with (tmp_path / "collectives.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["bytes"], row["contender"], row["hosts"]) for row in rows] == [
        (size, contender, "2") for size in ("4", "65536") for contender in ("ours", "gloo")
    ]


def test_a_step_after_a_kill_is_one_of_a_new_attempt(tmp_path: Path):
    (tmp_path / "7").write_text("100.0 3 1\n101.0 3 1\n")
    (tmp_path / "8").write_text("100.0 3 1\n101.0 3 1\n")
    journals = Journals(tmp_path)
    assert journals.all_stepped(0.0, 2) is None
    before = journals.attempts()
    assert before == {7: 1, 8: 1}
    with (tmp_path / "7").open("a") as file:
        file.write("101.1 3 1\n")  # ended after the kill, but had begun before
    journals.read()
    assert journals.next_step(7, before) is None
    for pid, moment in ((7, 101.5), (8, 101.6)):
        with (tmp_path / str(pid)).open("a") as file:
            file.write(f"{moment} 2 2\n{moment + 1} 3 3\n{moment + 2}")
    journals.read()
    assert [journals.next_step(pid, before) for pid in (7, 8)] == [101.5, 101.6]
    assert journals.whole_again(before, 3) is None
    (tmp_path / "9").write_text("102.7 3 1\n")
    assert journals.whole_again(before, 3) == 102.7


def test_promises_about_kills():
    good = [elastic.Kill(3, 0.8, 0.2)] * 24 + [elastic.Kill(4, 2.5, 0.2)]
    assert all(one.met for one in elastic.requirements(good, "cuda"))
    bad = [*good, elastic.Kill(4, 61.0, 0.5, (17,)), elastic.Kill(4, None, None, (), "it hangs")]
    judged = list(elastic.requirements(bad, "cuda"))
    assert [one.met for one in judged] == [True, False, False, False]
    assert [one.found for one in judged[:2]] == ["0.80 s", "never"]
    assert [one.met for one in elastic.requirements([], "cuda")] == [None] * 4
    lines = list(elastic.table(4, bad[-3:], 3.0))
    expected = "ours, survivors at 3 median 31.75 s worst 61.00 s of 2"
    assert " ".join(lines[0].split()) == expected
    assert "kill 2 of 3: 61.00 s to the next step of the survivors" in lines[2]
    assert "ENDED TOO: processes 17" in lines[2]
    assert lines[3].endswith("kill 3 of 3: never to the next step of the survivors; it hangs")


def test_kills_are_shared_out():
    options = elastic.parse(["--device", "cuda"])
    assert (options.np, options.kills, options.kill_limit) == ([3, 4], 50, 20.0)
    assert elastic.shares(50, 2) == [25, 25]
    assert elastic.shares(5, 2) == [3, 2]
    setting = elastic.setting_of(3, options, H200)
    assert setting.arguments == ("cuda", "shared")
    assert elastic.setting_of(3, options, Gpus("NVIDIA H200", 3)).arguments == ("cuda",)
    assert elastic.setting_of(4, elastic.parse([]), Gpus()).arguments == ()


def test_a_kill_is_measured(tmp_path: Path):
    program = [*forked_python(), str(ROOT / "benchmarks" / "elastic.py"), "--np", "3", "--check"]
    program += ["--kills", "1", "--only-ours", "--csv", str(tmp_path / "kills.csv")]
    found = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert "no kill leaves the job hanging: 0 did" in found.stdout, found.stderr
    assert "survivors keep their processes: 0 processes ended" in found.stdout
    with (tmp_path / "kills.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["ranks"], row["processes_lost"], row["problem"]) == ("3", "0", "")
    assert float(row["seconds_to_step_of_survivors"]) > 0


def test_the_report_about_compiled_steps(capsys: pytest.CaptureFixture[str]):
    """Ratios are of turns of the same round, and so is what is exposed."""
    times = {"ours": [2.0, 4.0, 2.0], "ddp": [3.0, 6.0, 3.0], "plain": [1.0, 2.0, 1.0]}
    samples = times | {f"{name} eager": values for name, values in times.items()}
    used = dict.fromkeys(samples, 0.5)
    assert compile_benchmark.show_steps("title", samples, used) == 1.5
    calls = {"in place": [20.0, 30.0], "new": [40.0, 40.0]}
    calls |= {"in place eager": [12.0, 22.0], "new eager": [50.0, 30.0], "nothing": [9.0, 11.0]}
    calls["entry"] = [90.0, 110.0]
    assert compile_benchmark.show_operator(calls) == 8.0
    printed = capsys.readouterr().out
    assert re.search(r"exposed, ours +1\.00 ms +1\.00 ms", printed)
    assert "ddp / ours: 1.500" in printed
    assert re.search(r"processor, ddp +0\.50 ms +0\.50 ms", printed)
    assert "in compiled code: 10.0" in printed
    assert "compiled function that does nothing: 100.0" in printed
