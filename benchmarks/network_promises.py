"""What the project promises between hosts, and how a run of benchmarks/network.py fared."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.collectives_report import KIB, human
from benchmarks.network_hosts import UNLIMITED
from benchmarks.network_report import Results, Setting
from benchmarks.promises import Requirement, times_text
from benchmarks.training_models import WORKLOADS

MODELS = ["mlp", "transformer", "resnet18"]
LINKS = [UNLIMITED, "10gbit", "1gbit"]
TWO = Setting(2, 1)
TWO_BY_FOUR = Setting(2, 4)
SPEED_OF_TWO_BY_FOUR = {"mlp": 1.2, "transformer": 1.0, "resnet18": 1.0}
SPEED_OF_NEXT_FORWARD = {"mlp": 1.1, "resnet18": 1.1}
TWICE_UP_TO = 64 * KIB
WIDEST = 0.2  # of an interval over its ratio; a wider one says nothing


def at_least(ratio: float, interval: tuple[float, float], wanted: float) -> bool | None:
    """Whether a ratio is what it must be; None where the measurement is too rough to tell.

    To be level is to have 1 in the interval, or below it. More than that must be seen.
    """
    low, high = interval
    if wanted > 1:
        return ratio >= wanted
    if high < wanted or low >= wanted:
        return low >= wanted
    return True if high - low <= WIDEST * ratio else None


def requirements(results: Results, settings: list[Setting]) -> Iterator[Requirement]:
    """The promises that concern these settings."""
    if any(setting.hosts == 2 and setting.per_host == 1 for setting in settings):
        yield from between_two_hosts(results)
    if TWO_BY_FOUR in settings:
        for model, wanted in SPEED_OF_TWO_BY_FOUR.items():
            yield speed(results, TWO_BY_FOUR, model, ("ddp", "ours"), wanted)
    for setting in settings:
        if setting.hosts == 1:
            yield calls(results, setting, 1.0)
            yield start(results, setting.size)


def between_two_hosts(results: Results) -> Iterator[Requirement]:
    for link in LINKS:
        for model in MODELS:
            yield speed(results, Setting(2, 1, link), model, ("ddp", "ours"), 1.0)
    slow = Setting(2, 1, "1gbit")
    for model, wanted in SPEED_OF_NEXT_FORWARD.items():
        yield speed(results, slow, model, ("ddp", "ours_next"), wanted)
    for model in MODELS:
        yield speed(results, slow, model, ("ddp_bf16", "ours_bf16"), 1.0)
    for model in MODELS:
        found = [run.same_losses(model) for run in results.training if run.setting.size == 2]
        same = next((one for one in found if one is not None), None)
        said = {True: "yes", False: "no", None: "not measured"}[same]
        text = f"{WORKLOADS[model].title}, 2 hosts: losses bitwise equal to DDP's"
        yield Requirement(text, same, said)
    for link in LINKS:
        setting = Setting(2, 1, link)
        if link == UNLIMITED or results.called(setting).samples:
            yield calls(results, setting, 1.0)
    yield calls(results, TWO, 2.0, TWICE_UP_TO)


def speed(
    results: Results, setting: Setting, model: str, duel: tuple[str, str], wanted: float
) -> Requirement:
    """Of training, `duel` being (theirs, ours)."""
    words = {"ours": "", "ours_next": " with the next forward", "ours_bf16": " in bf16"}[duel[1]]
    text = f"{WORKLOADS[model].title}, {setting.title}: at least {wanted}x DDP{words}"
    run = results.trained(setting)
    ratio = run.ratio(model, *duel)
    if ratio is None:
        return Requirement(text, None, "not measured")
    bounds = run.interval(model, *duel)
    met = at_least(ratio, bounds, wanted)
    found = with_interval(ratio, bounds, met)
    most = run.most(model) if duel[1] == "ours_next" else None
    return Requirement(text, met, found if most is None else f"{found}, {most:.2f}x being possible")


def calls(
    results: Results, setting: Setting, wanted: float, biggest: int | None = None
) -> Requirement:
    """Of the worst allreduce up to that size."""
    what = "never slower than" if wanted == 1 else f"at least {wanted:g}x"
    upto = "" if biggest is None else f" up to {human(biggest)}"
    text = f"allreduce, {setting.title}: {what} torch's Gloo{upto}"
    run = results.called(setting)
    sizes = [nbytes for nbytes in run.samples if biggest is None or nbytes <= biggest]
    if not sizes:
        return Requirement(text, None, "not measured")
    judged = [(at_least(run.ratio(n), run.interval(n), wanted), run.ratio(n), n) for n in sizes]
    order = {False: 0, None: 1, True: 2}  # the worst first
    met, ratio, nbytes = min(judged, key=lambda one: (order[one[0]], one[1]))
    found = with_interval(ratio, run.interval(nbytes), met)
    return Requirement(text, met, f"at {human(nbytes)}, the worst, {found}")


def start(results: Results, size: int) -> Requirement:
    text = f"{size} ranks: hvd.init() no slower than torch's init and first barrier"
    found = next((one for one in results.starts if one.size == size), None)
    if found is None:
        return Requirement(text, None, "not measured")
    ours, theirs = found.median("ours", "start"), found.median("gloo", "start")
    return Requirement(text, ours <= theirs, f"{ours:,.0f} ms against {theirs:,.0f}")


def with_interval(ratio: float, bounds: tuple[float, float], met: bool | None) -> str:
    found = f"{times_text(ratio)} ({bounds[0]:.2f} to {bounds[1]:.2f})"
    return f"{found}: too rough to tell" if met is None else found
