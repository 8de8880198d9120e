"""The report of ``horovodrun --check``: a table of hosts, and a sentence for each problem.

`host_check` fills in `HostReport`s and prints `describe`. Everything here is a pure function of
these reports.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from horovod.observe.reports.amounts import align_columns, join_words

_CLOCK_SECONDS = 0.5  # beyond which logs and timelines of several hosts no longer fit together
_SLOW_LINK = 0.25  # share of the median rate of all links


@dataclass
class HostReport:
    """The findings about one host. Fields stay empty if the host could not be asked."""

    name: str
    slots: int | None = None
    way: str = ""  # the program that reaches it, or "this machine"
    trouble: str = ""  # a sentence that says why it could not be asked, and what to do
    cores: int = 0
    address: str = ""  # the address at which other hosts reach it, and its interface
    interface: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # see `host_inspection`
    clock: float | None = None  # seconds by which it is ahead of this machine
    clock_error: float = 0.0  # how far that may be off
    links: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # to other hosts, by name


class HostProblem(NamedTuple):
    """Something that is wrong, and what to do about it."""

    text: str
    is_fatal: bool = True  # whether a job would fail


def find_problems(
    hosts: Sequence[HostReport], content: str, wanted: Sequence[str] = ()
) -> list[HostProblem]:
    """Return everything that is wrong.

    Args:
        hosts: The reports of all hosts.
        content: The digest of the working folder on this machine.
        wanted: The files that the command needs.
    """
    asked = [host for host in hosts if host.facts]
    return [
        *(HostProblem(host.trouble) for host in hosts if host.trouble),
        *_versions(asked),
        *_ports(hosts),
        *_folders(asked, content, wanted),
        *_devices(asked),
        *_clocks(asked),
        *_slow_links(asked),
    ]


def _versions(hosts: Sequence[HostReport]) -> Iterable[HostProblem]:
    without = [host for host in hosts if not host.facts["horovod"]]
    for python, names in _groups(without, lambda host: host.facts["executable"]).items():
        yield HostProblem(
            f"{python} on {join_words(names)} has no Horovod. Install it there as it is here, or "
            f"name a folder that has it in PYTHONPATH"
        )
    if len(without) < len(hosts) and not any(host.facts["torch"] for host in hosts):
        yield HostProblem(
            "there is no PyTorch, which Horovod needs with every framework: pip install torch"
        )
    rows = (
        ("Python", lambda host: host.facts["python"].rpartition(".")[0], True),
        ("torch", lambda host: host.facts["torch"], True),
        ("Horovod", lambda host: host.facts["horovod"], True),
        ("NCCL", lambda host: host.facts["nccl"], True),
        ("GPU driver", lambda host: host.facts["driver"], False),
    )
    for what, version, is_fatal in rows:
        groups = _groups(hosts, version)
        if what == "Horovod":
            groups.pop("", None)  # reported above
        if len(groups) > 1:
            yield HostProblem(
                f"hosts have different versions of {what}: {_describe_groups(groups)}. Install the "
                f"same on all of them",
                is_fatal,
            )


def _ports(hosts: Sequence[HostReport]) -> Iterable[HostProblem]:
    """Report hosts that others cannot connect to, each once."""
    by_name = {host.name: host for host in hosts}
    failures: dict[str, dict[str, str]] = {}
    for host in hosts:
        for other, link in host.links.items():
            if "error" in link:
                failures.setdefault(other, {})[host.name] = link["error"]
    for name, callers in failures.items():
        reasons = ", ".join(dict.fromkeys(callers.values()))
        yield HostProblem(
            f"{join_words(list(callers))} cannot connect to {name} at {by_name[name].address}: "
            f"{reasons}. Ranks connect to each other on any free port: let hosts do that (the "
            f"firewall of {name}, or one in between), or choose another network with "
            f"--network-interfaces"
        )


def _folders(
    hosts: Sequence[HostReport], content: str, wanted: Sequence[str]
) -> Iterable[HostProblem]:
    lost = [host for host in hosts if host.facts["lost_folder"]]
    for folder, names in _groups(lost, lambda host: host.facts["lost_folder"]).items():
        yield HostProblem(
            f"the folder {folder} is missing on {join_words(names)}, where ranks would run in the "
            f"home directory. Put it on a file system that all hosts share, copy it, or start in "
            f"a folder that all hosts have"
        )
    for file in wanted:
        names = [host.name for host in hosts if file in host.facts["missing"]]
        if names:
            yield HostProblem(
                f"{file}, which the command needs, is missing on {join_words(names)}: copy it there"
            )
    others = [h.name for h in hosts if h not in lost and h.facts["content"] != content]
    if others:
        yield HostProblem(
            f"the working folder of {join_words(others)} has other files than the one here. If it "
            f"is no shared file system, see that the program is the same there",
            is_fatal=False,
        )


def _devices(hosts: Sequence[HostReport]) -> Iterable[HostProblem]:
    if not any(host.facts["gpus"] for host in hosts):
        return
    few = [host for host in hosts if len(host.facts["gpus"]) < (host.slots or 0)]
    for host in few:
        yield HostProblem(
            f"{host.name} has {len(host.facts['gpus'])} GPUs for {host.slots} ranks, which then "
            f"share them or use the CPU. Give it fewer slots (-H {host.name}:SLOTS)",
            is_fatal=False,
        )
    groups = _groups(hosts, lambda host: describe_gpus(host.facts["gpus"]) or "none")
    if len(groups) > 1:
        yield HostProblem(
            f"hosts have different GPUs: {_describe_groups(groups)}. Every step takes as long as "
            f"the slowest needs",
            is_fatal=False,
        )


def _clocks(hosts: Sequence[HostReport]) -> Iterable[HostProblem]:
    for host in hosts:
        if host.clock is not None and abs(host.clock) > _CLOCK_SECONDS + host.clock_error:
            which = "ahead of" if host.clock > 0 else "behind"
            yield HostProblem(
                f"the clock of {host.name} is {abs(host.clock):.1f} s {which} this machine's, and "
                f"so are its logs. Let a time service (chrony, systemd-timesyncd) set it",
                is_fatal=False,
            )


def _slow_links(hosts: Sequence[HostReport]) -> Iterable[HostProblem]:
    rates = {
        (host.name, other): link["rate"]
        for host in hosts
        for other, link in host.links.items()
        if "rate" in link
    }
    if len(rates) < 3:
        return
    middle = statistics.median(rates.values())
    for (name, other), rate in rates.items():
        if rate < _SLOW_LINK * middle:
            yield HostProblem(
                f"{name} sends to {other} at {describe_rate(rate)}, while others have "
                f"{describe_rate(middle)}: every step waits for the slowest link. Look at its "
                f"cable, switch and interface, or leave the host out",
                is_fatal=False,
            )


# -- the table -----------------------------------------------------------------------------------


def describe(
    hosts: Sequence[HostReport],
    problems: Sequence[HostProblem],
    content: str,
    width: int | None = None,
) -> str:
    """Return the whole report for people; ``width`` is the terminal's, if there is one."""
    lines = [make_table(hosts, content, width), ""]
    fatal = [problem for problem in problems if problem.is_fatal]
    lesser = [problem for problem in problems if not problem.is_fatal]
    for title, findings in (("A job would fail", fatal), ("Worth knowing", lesser)):
        if findings:
            lines += [f"{title}:", *(f"  - {finding.text}." for finding in findings), ""]
    if not fatal:
        many = "this host" if len(hosts) == 1 else f"these {len(hosts)} hosts"
        lines.append(f"A job can run on {many}.")
    return "\n".join(lines).rstrip()


def make_table(hosts: Sequence[HostReport], content: str, width: int | None = None) -> str:
    """Return a table with a row for each host, without columns in which no host has anything.

    If it is wider than the terminal, what all hosts have in common is in a line below instead.
    """
    columns: list[tuple[str, Callable[[HostReport], str]]] = [
        ("host", lambda host: host.name),
        ("reached", lambda host: "no" if not host.facts else host.way),
        ("Python", lambda host: str(host.facts["python"])),
        ("torch", lambda host: str(host.facts["torch"] or "none")),
        ("Horovod", lambda host: str(host.facts["horovod"] or "none")),
        ("NCCL", lambda host: str(host.facts["nccl"])),
        ("driver", lambda host: str(host.facts["driver"])),
        ("GPUs", lambda host: describe_gpus(host.facts["gpus"])),
        ("cores", lambda host: str(host.cores or "")),
        ("memory", lambda host: f"{host.facts['memory'] / 2**30:.0f} GiB"),
        ("clock", _clock),
        ("address", lambda host: f"{host.interface} {host.address}".strip()),
        ("ports", lambda host: _open_ports(host, hosts)),
        ("to next host", _next),
        ("folder", lambda host: _folder(host, content)),
    ]
    rows = [
        [
            cell(host) if host.facts or title in ("host", "reached") else "-"
            for title, cell in columns
        ]
        for host in hosts
    ]
    cells = [[title, *(row[index] for row in rows)] for index, (title, _) in enumerate(columns)]
    cells = [column for column in cells if any(text not in ("", "-") for text in column[1:])]
    common = [column for column in cells[2:] if len(set(column[1:]) - {"-"}) == 1]
    if width is None or len(hosts) == 1 or max(map(len, _aligned(cells))) <= width:
        return "\n".join(_aligned(cells))
    said = [f"{title} {next(text for text in texts if text != '-')}" for title, *texts in common]
    lines = _aligned([column for column in cells if column not in common])
    return "\n".join([*lines, *textwrap.wrap(f"On all of them: {', '.join(said)}", width)])


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    return align_columns(list(zip(*columns, strict=True)))


def describe_rate(rate: float) -> str:
    """Return a rate, given in bytes per second, in the units that are usual for networks."""
    bits = rate * 8
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def describe_gpus(names: Sequence[str]) -> str:
    """Return for example ``8 x NVIDIA H100``; empty for no GPU."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _clock(host: HostReport) -> str:
    if host.clock is None:
        return ""
    if abs(host.clock) <= host.clock_error:
        return "same"  # the difference is too small to be measured from here
    return f"{host.clock * 1e3:+.0f} ms" if abs(host.clock) < 10 else f"{host.clock:+.0f} s"


def _open_ports(host: HostReport, hosts: Sequence[HostReport]) -> str:
    """Say whether a host reaches its neighbours, and whether they reach it."""
    outward = host.links.values()
    inward = [other.links[host.name] for other in hosts if host.name in other.links]
    if not outward and not inward:
        return ""
    ways = ["out"] * all("error" not in link for link in outward)
    ways += ["in"] * all("error" not in link for link in inward)
    return {2: "both ways", 0: "closed"}.get(len(ways), f"{''.join(ways)} only")


def _next(host: HostReport) -> str:
    """Describe the link to the neighbour to which the rate was measured."""
    for link in host.links.values():
        if "rate" in link:
            return f"{link['seconds'] * 1e3:.2f} ms, {describe_rate(link['rate'])}"
    return ""


def _folder(host: HostReport, content: str) -> str:
    if host.facts["lost_folder"]:
        return "missing"
    return "same" if host.facts["content"] == content else "other files"


def _groups(
    hosts: Iterable[HostReport], value: Callable[[HostReport], str]
) -> dict[str, list[str]]:
    """Group the names of hosts by a value."""
    groups: dict[str, list[str]] = {}
    for host in hosts:
        groups.setdefault(value(host), []).append(host.name)
    return groups


def _describe_groups(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value or 'none'} on {join_words(names)}" for value, names in groups.items())
