"""Bucketing: which gradients are reduced together, and whether while backward goes on.

These are pure functions of facts on which the ranks have agreed
(`horovod.torch.gradients.agreement`), so that all decide alike. `horovod.torch.gradients.plan`
brings the facts, and `horovod.torch.gradients.reducer` does what is decided here.

- On an accelerator a bucket is reduced as soon as it is complete: the device works by itself
  (`device_bucket`, `cut_for_device`).
- Between hosts too, where the first steps show that the network takes the time, not the processor:
  backward hides that. The network also decides how large a bucket is: each costs Python something,
  but everybody waits for the last one.
- Inside one host it depends on the cores and the model: a second thread costs Python's lock and a
  core. Where every core has a rank it is not tried, else the first steps show what is faster.

A bucket becomes one request. The engine leaves it whole, unless others are ready at the same time:
then it puts together what fits (`horovod.engine.execution.batches`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

MEBIBYTE = 1 << 20

# A bucket has a quarter of all bytes, so that most are on their way before backward ends; at most:
LARGEST_BUCKET = 128 * MEBIBYTE
SMALLEST_BUCKET = 8 * MEBIBYTE  # on an accelerator
SMALLEST_HOST_BUCKET = MEBIBYTE // 2
FIRST_DEVICE_BUCKET = MEBIBYTE  # so that the device's library has something to do early
DEVICE_BUCKET = 25 * MEBIBYTE
DELAYED_BUCKET = 10 * MEBIBYTE
LAST_DEVICE_BUCKETS = 4 * MEBIBYTE  # of two ranks, at the end: see `last_buckets`
_SHARES = 4
_LITTLE = 8  # a bucket of at most this part of the limit goes with the next gradient

# Between hosts a bucket takes this long to reduce. Measured with 1 Gbit/s (1 MiB) and more.
_BUCKET_SECONDS = 0.008
SMALLEST_NETWORK_BUCKET = MEBIBYTE
_PROCESSOR_RATE = 500e6  # bytes a second; a network that does more keeps a core busy
TRIAL_STEPS = 10  # all gradients at once; the fastest counts, as connections and memory warm up
LOOK_STEPS = 3  # steps between looks whether backward hides more than it was given
_WORTH_RECUTTING = 0.02  # part of all bytes that must move from the step into backward

# The knobs by which the user decides what is decided here otherwise.
OVERLAP_KNOB, SIZE_KNOB = "overlap_backward", "fusion_threshold"


class Measurement(Enum):
    """What the next steps are to show, before the final decision."""

    NOTHING = 0
    NETWORK = 1  # how long it takes to reduce all gradients at once
    OVERLAP = 2  # whether steps are shorter if buckets are reduced while backward goes on
    EVERYTHING = 3  # HOROVOD_AUTOTUNE: which of all settings makes them shortest


class Bucketing(NamedTuple):
    """A decision: how to reduce, and what to measure meanwhile."""

    overlap: bool  # reduce each bucket while backward goes on, or all gradients together after it
    bucket_bytes: int
    measurement: Measurement = Measurement.NOTHING


@dataclass(frozen=True)
class BucketPolicy:
    """Decides for one optimizer, from facts that are the same on all ranks."""

    num_bytes: int  # bytes of all gradients
    limit: int  # bytes of a bucket
    overlap: bool  # whether every rank can reduce while backward goes on: see `can_overlap`
    on_device: bool  # whether gradients are on an accelerator
    crosses_hosts: bool  # whether the ranks are on several hosts
    spare_cores: bool  # whether every rank has one for a thread beside backward
    fixed: frozenset[str] = frozenset()  # knobs that the user has set
    autotune: bool = False
    grouped: bool = False  # whether the user says what the buckets are
    hooked: bool = False  # whether a communication hook reduces them
    delayed: bool = False  # whether the next forward waits, for one bucket after the other

    def unmeasured(self) -> Bucketing:
        """Return what to do for now, without time to measure anything."""
        return Bucketing(self.overlap, first_bucket(self.num_bytes, self.limit, self.on_device))

    def at_first(self) -> Bucketing:
        """Return what to do in the first steps."""
        first = self.unmeasured()
        if self.autotune:
            return first._replace(measurement=Measurement.EVERYTHING)
        is_free = not self.grouped and SIZE_KNOB not in self.fixed and not self.on_device
        if self.overlap and self.crosses_hosts and is_free:
            return first._replace(overlap=False, measurement=Measurement.NETWORK)
        return self._checked(first)

    def after_trial(self, seconds: float) -> Bucketing:
        """Return what to do if it takes `seconds` to reduce all gradients at once."""
        wanted = self.delayed or OVERLAP_KNOB in self.fixed
        overlap = wanted or pays_beside_backward(self.num_bytes, seconds)
        size = network_bucket(self.num_bytes, self.limit, seconds)
        return self._checked(Bucketing(overlap, size))

    def _checked(self, found: Bucketing) -> Bucketing:
        """Return `found`; without overlap, let the next steps show whether overlap is faster.

        Only if it is up to us, and in host memory, where it depends on many things.
        """
        is_free = OVERLAP_KNOB not in self.fixed and not self.hooked and not self.on_device
        if found.overlap or not self.spare_cores or not is_free:
            return found
        return found._replace(measurement=Measurement.OVERLAP)


def can_overlap(on_device: bool, over_network: bool, wanted: bool | None) -> bool:
    """Return whether to reduce while backward goes on; `wanted` is what the user says."""
    return on_device or over_network if wanted is None else wanted


def first_bucket(total: int, limit: int, on_device: bool) -> int:
    """Return the bytes of a bucket if all have `total`, and no network has been measured."""
    smallest = SMALLEST_BUCKET if on_device else SMALLEST_HOST_BUCKET
    return min(limit, LARGEST_BUCKET, max(smallest, total // _SHARES))


def device_bucket(limit: int, delayed: bool) -> int:
    """Return the bytes of a bucket that a device's library reduces, of at most `limit`.

    Every bucket costs some time, and everybody waits for the last one. Measured with 2 ranks on one
    H200 that talk over sockets, for the 98 MiB of ResNet-50: a step takes 60.5 ms with buckets of
    10 MiB, 57.3 with 25, and with 40 as long as with 25. Where the next forward waits for one
    bucket after the other (`delayed`), smaller ones come earlier.
    """
    return min(limit, DELAYED_BUCKET if delayed else DEVICE_BUCKET)


def last_buckets(ranks: int) -> int:
    """Return the bytes under which the last buckets on a device need not be, for so many ranks.

    Smaller ones cost more time than they save. A ring of n ranks passes every bucket on 2 (n - 1)
    times, each of which has its delay. Measured with 4 ranks on one H200 that talk over sockets,
    for ResNet-50: DDP's step takes 0.97 to 1.00 times as long as ours with 4 MiB (median of 7 races
    0.98), and 1.01 to 1.06 times with 12 MiB (3 races).
    """
    return LAST_DEVICE_BUCKETS * max(1, ranks - 1)


def network_bucket(total: int, limit: int, seconds: float) -> int:
    """Return the bytes of a bucket if reducing all `total` bytes at once takes `seconds`."""
    if seconds <= 0:
        return min(limit, SMALLEST_BUCKET)
    moved = int(total * _BUCKET_SECONDS / seconds)
    return min(limit, LARGEST_BUCKET, max(SMALLEST_NETWORK_BUCKET, moved))


def pays_beside_backward(total: int, seconds: float) -> bool:
    """Return whether reducing `total` bytes at once, in `seconds`, was waiting more than work.

    The processor's work takes as long beside backward as after it, and buckets add to it.
    """
    return total < _PROCESSOR_RATE * seconds


def num_hidden(sizes: Sequence[int], hidden: float) -> int:
    """Return how many of the first buckets to begin in backward, if it hides `hidden` bytes.

    This is for a next forward that waits for one bucket after the other (overlap_forward). What
    comes first in backward is needed last, so whatever backward does not hide had better go in the
    opposite order; what is on its way cannot be overtaken. A bucket is hidden if most of it is.
    """
    count = 0
    for size in sizes:
        if hidden <= size // 2:
            break
        count += 1
        hidden -= size
    return count


def hides_more(num_bytes: int, hidden: float, idle: float, rate: float) -> float | None:
    """Return how many bytes backward hides after all; None if `hidden` was about right.

    The network had been idle for `idle` seconds when backward ended, because backward takes longer
    when a thread works beside it than it did in the trial.
    """
    more = idle * rate
    enough = hidden >= num_bytes or more < _WORTH_RECUTTING * num_bytes
    return None if enough else hidden + more


def cut(sizes: Sequence[int], most: int, limit: int) -> list[range]:
    """Return which gradients of these sizes, in bytes, make a bucket: consecutive, up to `most`.

    None is divided: one that is larger has a bucket of its own, together with the little that
    comes right before it (biases, say), which is not worth a reduction by itself; but not if
    that makes more than `limit`.
    """
    starts, size = [0], 0
    for index, nbytes in enumerate(sizes):
        goes_along = size <= most // _LITTLE and nbytes > most and size + nbytes <= limit
        if index > starts[-1] and size + nbytes > most and not goes_along:
            starts.append(index)
            size = 0
        size += nbytes
    return [range(*ends) for ends in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def cut_for_device(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    most: int,
    limit: int,
    last: int = LAST_DEVICE_BUCKETS,
    whole: bool = False,
) -> list[list[int]]:
    """Return which of the gradients of these sizes and kinds (types) make a bucket on a device.

    A bucket has up to `most` bytes, all of one kind. The first is small, so that the library has
    something to do early, and so are the last, for which everybody waits: none has more than half
    of what is left, or `last` bytes. Buckets come in the order in which their last gradients do.
    With `whole`, all of a kind are one.
    """
    left = sum(sizes)
    limits: dict[Hashable, int] = {}
    open_buckets: dict[Hashable, list[int]] = {}
    buckets: list[list[int]] = []
    for index, (nbytes, kind) in enumerate(zip(sizes, kinds, strict=True)):
        bucket = open_buckets.get(kind)
        size = sum(sizes[member] for member in bucket) if bucket else 0
        # A large gradient takes the little before it along. The last few bytes of all, which are
        # not worth a bucket of their own, go with those before.
        goes_along = size + nbytes <= limit and (
            left < LAST_DEVICE_BUCKETS // 2 or (bucket and size <= limits[kind] // _LITTLE)
        )
        if bucket and size + nbytes > limits[kind] and not goes_along:
            buckets.append(bucket)
            bucket = None
        if bucket is None:
            bucket = open_buckets[kind] = []
            share = max(left // 2, last) if buckets else FIRST_DEVICE_BUCKET
            limits[kind] = most if whole else min(most, share)
        bucket.append(index)
        left -= nbytes
    return sorted([*buckets, *open_buckets.values()], key=lambda bucket: bucket[-1])


def bucket_title(number: int, count: int, names: Sequence[str]) -> str:
    """Return a bucket's title for people, in the timeline and in stall reports."""
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"bucket {number} of {count} ({span})"
