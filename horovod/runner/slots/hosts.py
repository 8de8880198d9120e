"""Read host lists in every form, and plan on which host each rank runs.

`arguments` reads ``-H`` and hostfiles, `allocation` what a batch system says; `jobs.request` makes
the plan; `worker_env` turns each slot into a worker's variables. Nothing here asks a name server: a
list of hundreds of hosts must not wait for one.
"""

from __future__ import annotations

import functools
import itertools
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from horovod.common.topology import Slot

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)  # so that no name can pass for an option of ssh
_ITEM = re.compile(r"(?P<name>\[[^\[\]]*\]|[^\[\]:]+(?:\[[^\[\]]*\][^\[\]:]*)*)(?::(?P<slots>.*))?")
COMMA = re.compile(r",(?![^\[]*\])")  # a comma outside brackets
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_MAX_HOSTS = 100_000  # a range with a digit too many is a mistake, not a cluster


@dataclass(frozen=True)
class Host:
    """A host of the job.

    Hosts without a number of slots share the ranks for which the other hosts have no slots.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str, may_be_none: bool = False) -> list[Host]:
    """Read the value of ``-H``.

    Args:
        text: Items separated by commas: ``NAME``, ``NAME:SLOTS``, ``[IPV6]:SLOTS``, or ranges such
            as ``node[01-04,7]:SLOTS``. Hosts with 0 slots are left out.
        may_be_none: Whether no host at all may be left.

    Raises:
        ValueError: If an item is wrong, or no host is left; the message names the item.
    """
    hosts = [host for item in COMMA.split(text) for host in _expand(item.strip())]
    seen = set()
    for host in hosts:
        if host.name in seen:
            raise ValueError(f"host {host.name!r} is named twice")
        seen.add(host.name)
    offered = _without_empty(hosts)
    if not offered and not may_be_none:
        raise ValueError(f"{text!r} offers no slots")
    return offered


def _without_empty(hosts: Iterable[Host]) -> list[Host]:
    """Leave out the hosts that offer no slots at the moment, as scripts that count them write."""
    return [host for host in hosts if host.slots != 0]


def parse_hostfile(lines: Iterable[str]) -> list[Host]:
    """Read a hostfile.

    Args:
        lines: The lines of the file. Each is an item as for ``-H``, or ``NAME slots=N``; ``#``
            begins a comment. As with MPI, a host on several lines offers the sum of their slots,
            hosts with 0 slots are left out, and max-slots is ignored.

    Raises:
        ValueError: If a line is wrong, or there is no host; the message names the line.
    """
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        content = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not content:
            continue
        try:
            hosts += _with_slots(_expand(content[0]), content[1:])
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not hosts:
        raise ValueError("it names no host")
    offered = _without_empty(hosts)
    if not offered:
        raise ValueError("it offers no slots")
    return merge_hosts(offered)


def merge_hosts(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once; a host that is named several times offers the sum of its slots."""
    slots: dict[str, int | None] = {}
    for host in hosts:
        if host.name in slots:
            slots[host.name] = (slots[host.name] or 1) + (host.slots or 1)
        else:
            slots[host.name] = host.slots
    return [Host(name, count) for name, count in slots.items()]


@functools.cache
def is_local(name: str) -> bool:
    """Return whether a host of the list is this machine.

    That is true for localhost, this machine's host name, its addresses, and names that /etc/hosts
    gives to them. Another alias counts as another host, which ssh reaches all the same.
    """
    own = socket.gethostname()
    if name in {"localhost", own, own.partition(".")[0]} or _is_own_address(name):
        return True
    if name.partition(".")[0] == own.partition(".")[0]:  # the long form of our name, or a namesake
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return False
        return any(_is_own_address(str(entry[4][0])) for entry in found)
    return name in _own_aliases()


def plan_slots(hosts: Sequence[Host], num_proc: int) -> list[Slot]:
    """Return the slots of ranks 0 to ``num_proc`` - 1, filling one host after the other.

    Raises:
        ValueError: If the hosts offer fewer slots than that.
    """
    counts = _share_ranks(hosts, num_proc)
    cross_sizes = [
        sum(count > local_rank for count in counts) for local_rank in range(max(counts, default=0))
    ]
    slots: list[Slot] = []
    cross_ranks = [0] * len(cross_sizes)  # by local rank: the next cross rank
    for host, count in zip(hosts, counts, strict=True):
        for local_rank in range(count):
            slots.append(
                Slot(
                    hostname=host.name,
                    rank=len(slots),
                    size=num_proc,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=cross_ranks[local_rank],
                    cross_size=cross_sizes[local_rank],
                )
            )
            cross_ranks[local_rank] += 1
    return slots


def _share_ranks(hosts: Sequence[Host], num_proc: int) -> list[int]:
    """Return the number of ranks of each host, ``num_proc`` in all."""
    open_ended = sum(host.slots is None for host in hosts)
    left = max(0, num_proc - sum(host.slots or 0 for host in hosts))
    if left and not open_ended:
        offered = sum(host.slots or 0 for host in hosts)
        raise ValueError(
            f"the hosts offer {offered} slots, but {num_proc} processes are to run; "
            f"give more slots (-H NAME:SLOTS) or a smaller -np"
        )
    shares = iter([left // open_ended + (i < left % open_ended) for i in range(open_ended)])
    free = num_proc
    counts = []
    for host in hosts:
        offered = next(shares) if host.slots is None else host.slots
        counts.append(min(offered, free))
        free -= counts[-1]
    return counts


def _expand(item: str) -> list[Host]:
    """Return the hosts of one item: several if it has a range."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(_describe_form(item))
    slots = None if match["slots"] is None else slot_count(match["slots"], item, least=0)
    name = match["name"]
    if name.startswith("["):
        return [Host(_ipv6(name[1:-1]), slots)]
    names = map("".join, itertools.product(*name_pieces(name)))
    return [Host(checked_name(each, item), slots) for each in names]


def name_pieces(pattern: str) -> list[list[str]]:
    """Split a pattern into its parts, each with all its values.

    ``r[1-2]n[01-04]`` has five parts: a text, numbers, a text, numbers and an empty text.
    """
    pieces: list[list[str]] = []
    total = 1
    for index, piece in enumerate(_BRACKETS.split(pattern)):
        pieces.append(_numbers(piece, pattern) if index % 2 else [piece])
        total *= len(pieces[-1])
        if total > _MAX_HOSTS:
            raise ValueError(f"{pattern!r} stands for more than {_MAX_HOSTS} hosts")
    return pieces


def _numbers(text: str, pattern: str) -> list[str]:
    """Expand ``01-03,7`` to 01, 02, 03 and 7; all have at least the digits of the lower end."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} in {pattern!r} is not a number or a range such as 01-04")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise ValueError(f"the range {part!r} in {pattern!r} runs backwards")
        if int(high) - int(low) >= _MAX_HOSTS:
            raise ValueError(f"{pattern!r} stands for more than {_MAX_HOSTS} hosts")
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    return numbers


def _with_slots(hosts: list[Host], words: Sequence[str]) -> list[Host]:
    """Apply the ``slots=N`` of a hostfile's line."""
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in {"slots", "max-slots", "max_slots"}:
            raise ValueError(f"{word!r} is not of the form slots=N")
        if key == "slots":
            if hosts[0].slots is not None:
                raise ValueError(f"{hosts[0].name!r} has its slots given twice")
            hosts = [Host(host.name, slot_count(value, least=0)) for host in hosts]
    return hosts


def slot_count(text: str, item: str = "", least: int = 1) -> int:
    """Return a number of slots; raise `ValueError`, which shows ``item``, for other text."""
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise ValueError(_describe_form(item) if item else f"{text!r} is not a number of slots")
    if int(text) < least:
        raise ValueError(f"{item or 'slots=0'!r} offers no slots")
    return int(text)


def checked_name(name: str, item: str = "") -> str:
    """Return the name if it can be that of a host; raise `ValueError`, with ``item``, if not."""
    if not _NAME.fullmatch(name):
        raise ValueError(_describe_form(item or name))
    return name


def _ipv6(text: str) -> str:
    address, percent, zone = text.partition("%")
    try:
        socket.inet_pton(socket.AF_INET6, address)
        if percent:
            checked_name(zone)
    except (OSError, ValueError):
        raise ValueError(f"'[{text}]' is not an IPv6 address") from None
    return text


def _describe_form(item: str) -> str:
    hint = f"; put IPv6 addresses in brackets: [{item}]" if item.count(":") > 1 else ""
    return f"{item!r} is not of the form NAME, NAME:SLOTS or [IPV6]:SLOTS{hint}"


def _is_own_address(text: str) -> bool:
    """Return whether ``text`` is an address that this machine can listen on."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    try:
        socket.inet_pton(family, text.partition("%")[0])
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            scope = (0, socket.if_nametoindex(text.partition("%")[2])) if "%" in text else ()
            probe.bind((text.partition("%")[0], 0, *scope))
    except (OSError, ValueError):
        return False
    return True


@functools.cache
def _own_aliases() -> frozenset[str]:
    """Return the names that /etc/hosts gives to this machine's addresses."""
    names: set[str] = set()
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].split() for line in file]
    except OSError:
        return frozenset()
    for words in lines:
        if len(words) > 1 and _is_own_address(words[0]):
            names.update(words[1:])
    return frozenset(names)
