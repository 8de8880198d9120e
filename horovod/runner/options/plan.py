"""The options of ``horovodrun --plan``, and what they mean together."""

from __future__ import annotations

import argparse
import re

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"


def add_plan(group: argparse._ArgumentGroup) -> None:
    """Add the options of the group "plan"."""
    group.add_argument(
        "--plan",
        action="store_true",
        help="Show how fast training can be over the hosts' link, with gradients averaged in every "
        "step, in fewer bits, or every so many steps, recommend one, and exit. Needs the three "
        "options below, and -np or -H, such as: --plan -np 8 --model-size 124M --step-time 0.3 "
        "--link 1Gbit/20ms.",
    )
    group.add_argument(
        "--model-size",
        type=parameters,
        metavar="N",
        help="Number of the model's parameters: 350K, 124M or 7B.",
    )
    group.add_argument(
        "--step-time",
        type=seconds,
        metavar="SECONDS",
        help="Time of a training step on one host without communication.",
    )
    group.add_argument(
        "--link",
        type=link,
        metavar="RATE/LATENCY",
        help="What connects the hosts: 10Gbit, 1Gbit/20ms or 100Mbit/50ms; the latency is one way "
        "(default: 0).",
    )


def parameters(text: str) -> float:
    """Read a number of parameters such as ``124M``."""
    match = re.fullmatch(rf"{_NUMBER}([KMB]?)", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a number of parameters such as 350K, 124M or 7B")
    return float(match[1]) * _COUNTS[match[2].upper()]


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    match = re.fullmatch(rf"{_NUMBER}s?", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a number of seconds such as 0.3")
    return float(match[1])


def link(text: str) -> tuple[float, float]:
    """Read a link such as ``1Gbit/20ms``: seconds one way, and bytes per second."""
    match = re.fullmatch(rf"{_NUMBER}([kmg]bit)(?:/s)?(?:/{_NUMBER}(us|ms|s))?", text.lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a link such as 10Gbit, 1Gbit/20ms or 100Mbit/50ms")
    latency = float(match[3]) * _TIMES[match[4]] if match[3] else 0.0
    return latency, float(match[1]) * _RATES[match[2]] / 8


def check_plan(options: argparse.Namespace) -> None:
    """Check that the options of a plan are complete, or that there is none of them.

    Raises:
        ValueError: An option is missing that a plan needs, or --plan itself.
    """
    if not options.plan:
        for flag in ("--model-size", "--step-time", "--link"):
            if getattr(options, flag[2:].replace("-", "_")) is not None:
                raise ValueError(f"argument {flag}: it belongs to --plan, which is missing")
        return
    needed = {"--model-size": options.model_size, "--step-time": options.step_time}
    for flag, value in {**needed, "--link": options.link}.items():
        if value is None:
            raise ValueError(
                f"argument --plan: {flag} is missing; for example: horovodrun --plan -np 8 "
                f"--model-size 124M --step-time 0.3 --link 1Gbit/20ms"
            )
    if not options.hosts and not options.num_proc:
        raise ValueError("argument --plan: say how many hosts there are, with -np or -H")
