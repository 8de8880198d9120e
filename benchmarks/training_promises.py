"""What the project promises for training, and how a run of benchmarks/training.py fared."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.promises import Requirement, times_text
from benchmarks.training_models import WORKLOADS
from benchmarks.training_report import LABELS, Results, Run, fraction, interval_text

SPEED = {"mlp": 1.6, "cnn": 1.2, "transformer": 1.3, "resnet18": 1.3}
EFFICIENCY = {"mlp": 0.82, "cnn": 0.95, "transformer": 0.82, "resnet18": 0.90}
SPEED_OF_EIGHT = {"mlp": 1.7, "cnn": 1.7}

GPU_MODELS = ["resnet50", "gpt"]  # of several ranks
GPU_MODELS_OF_ONE = ["resnet50", "gpt2"]
GPU_SIZES = [2, 4]
LEVEL = 1.0  # times DDP's speed, as printed: to two places
LOWEST = 0.97  # between hosts, where the interval of the ratio may begin
NEXT_FORWARD = {"resnet50": 1.1}
MOST_OF_PLAIN = {"cpu": 1.02, "cuda": 1.01, "xpu": 1.02}  # a step of one rank


def requirements(results: Results, device: str) -> Iterator[Requirement]:
    """The promises that concern this device."""
    if device == "cpu":
        yield from on_cpus(results)
    elif device == "cuda":
        yield from on_gpus(results)
    one = results.run(1)
    most = MOST_OF_PLAIN[device]
    for model in one.speed or (SPEED if device == "cpu" else GPU_MODELS_OF_ONE):
        found = one.ratio(model, "ours", "plain")
        text = f"{WORKLOADS[model].title}, 1 rank: within {100 * (most - 1):.0f} % of the plain "
        text += "optimizer"
        percent = "not measured" if found is None else f"{100 * (found - 1):+.1f} %"
        yield Requirement(text, None if found is None else found <= most, percent)


def on_cpus(results: Results) -> Iterator[Requirement]:
    two, eight = results.run(2), results.run(8)
    for model, wanted in SPEED.items():
        yield faster(f"{wanted}x DDP", two, model, wanted)
    for model, wanted in EFFICIENCY.items():
        found = two.ratio(model, "plain", "ours")
        text = f"{WORKLOADS[model].title}, 2 ranks: efficiency of at least {wanted}"
        yield Requirement(text, met(found, wanted), fraction(found))
    for model in SPEED:
        yield lighter(two, model)
        yield same_losses(two, model)
    if eight.speed:
        for model, wanted in SPEED_OF_EIGHT.items():
            yield faster(f"{wanted}x DDP", eight, model, wanted)


def on_gpus(results: Results) -> Iterator[Requirement]:
    """Those about several ranks, which may share a GPU."""
    for size in GPU_SIZES:
        for hosts in (size, 1):
            for model in GPU_MODELS:
                yield level(results.run(size, hosts), model, "ddp", "ours")
    both = [results.run(2, 2), results.run(2)]
    for model in GPU_MODELS:
        run = next((run for run in both if "ours_bf16" in run.speed.get(model, {})), both[0])
        yield level(run, model, "ddp_bf16", "ours_bf16")
    for model, wanted in NEXT_FORWARD.items():
        run = next((run for run in both if "ours_next" in run.speed.get(model, {})), both[0])
        yield level(run, model, "ddp", "ours_next", wanted)
    for model in GPU_MODELS:
        yield lighter(next((run for run in both if model in run.memory), both[0]), model)
        yield same_losses(next((run for run in both if model in run.losses), both[0]), model)


def level(run: Run, model: str, theirs: str, ours: str, wanted: float = LEVEL) -> Requirement:
    """That ours is at least `wanted` times as fast; between hosts, with an interval that shows it.

    What is judged is the ratio as it is printed, so that 0.996 is 1.00.
    """
    lowest = LOWEST if run.hosts > 1 and wanted == LEVEL else -math.inf
    text = f"{WORKLOADS[model].title}, {run.title}: {LABELS[ours]} at least {wanted:.2f}x "
    text += LABELS[theirs]
    text += f", no interval below {lowest}" if math.isfinite(lowest) else ""
    ratio = run.ratio(model, theirs, ours)
    if ratio is None:
        return Requirement(text, None, "not measured")
    bounds = run.interval(model, theirs, ours)
    found = f"{times_text(ratio)} {interval_text(bounds)}"
    if not math.isfinite(bounds[0]):
        return Requirement(text, None, found)
    return Requirement(text, round(ratio, 2) >= wanted and bounds[0] >= lowest, found)


def faster(text: str, run: Run, model: str, wanted: float) -> Requirement:
    found = run.ratio(model, "ddp", "ours")
    title = f"{WORKLOADS[model].title}, {run.title}: at least {text}"
    return Requirement(title, met(found, wanted), times_text(found))


def lighter(run: Run, model: str) -> Requirement:
    text = f"{WORKLOADS[model].title}, {run.size} ranks: peak memory no more than DDP's"
    peaks = run.memory.get(model, {})
    if not {"ours", "ddp"} <= set(peaks):
        return Requirement(text, None, "not measured")
    ours, ddp = round(peaks["ours"]), round(peaks["ddp"])  # they differ by more between runs
    return Requirement(text, ours <= ddp, f"{ours} MiB against {ddp}")


def same_losses(run: Run, model: str) -> Requirement:
    same = run.same_losses(model)
    text = f"{WORKLOADS[model].title}, {run.title}: losses bitwise equal to DDP's"
    return Requirement(text, same, {True: "yes", False: "no", None: "not measured"}[same])


def met(found: float | None, wanted: float) -> bool | None:
    return None if found is None else found >= wanted
