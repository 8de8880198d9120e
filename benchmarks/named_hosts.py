"""Hosts that are only names: the option by which benchmarks place ranks on one or on several.

`benchmarks.processes.torchrun_environments` gives ranks the names; `benchmarks.network` has hosts
with networks of their own.
"""

from __future__ import annotations

import argparse

CHOICES = ["one", "several"]


def add_hosts_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        nargs="+",
        choices=CHOICES,
        help="whether all ranks are on one host or each on another, by HOROVOD_HOSTNAME (one; on "
        "cuda several one, a run of each)",
    )


def chosen_hosts(options: argparse.Namespace) -> list[str]:
    """What was asked for, or else what is usual on the device."""
    return options.hosts or (["several", "one"] if options.device == "cuda" else ["one"])


def host_counts(options: argparse.Namespace, size: int) -> list[int]:
    """The numbers of hosts that `size` ranks are on, in one run after the other."""
    if size == 1:
        return [1]
    return [{"one": 1, "several": size}[hosts] for hosts in chosen_hosts(options)]
