"""Compute with sets of times, which are sorted lists of stretches that do not touch.

`splitting` uses this.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Stretch = tuple[float, float]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the times that are in any stretch; empty and reversed stretches do not count."""
    joined: list[Stretch] = []
    for began, ended in sorted(stretch for stretch in stretches if stretch[0] < stretch[1]):
        if joined and began <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((began, ended))
    return joined


def intersection(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return the times that are in both."""
    common, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        began = max(one[left][0], other[right][0])
        ended = min(one[left][1], other[right][1])
        if began < ended:
            common.append((began, ended))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return common


def difference(one: Sequence[Stretch], other: Sequence[Stretch]) -> list[Stretch]:
    """Return the times that are in the first and not in the second."""
    if not one:
        return []
    rest: list[Stretch] = []
    position = one[0][0]
    for began, ended in other:
        rest.append((position, began))
        position = max(position, ended)
    rest.append((position, max(position, one[-1][1])))
    return intersection(one, [stretch for stretch in rest if stretch[0] < stretch[1]])


def clip(stretches: Sequence[Stretch], began: float, ended: float) -> list[Stretch]:
    """Return the times that lie between `began` and `ended`."""
    first = bisect_right(stretches, began, key=lambda stretch: stretch[1])
    last = bisect_left(stretches, ended, key=lambda stretch: stretch[0])
    return [(max(a, began), min(b, ended)) for a, b in stretches[first:last]]


def length(stretches: Iterable[Stretch]) -> float:
    """Return the length of all stretches together."""
    return sum(ended - began for began, ended in stretches)
