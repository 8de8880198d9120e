"""Whether gradients are reduced while backward goes on, and how many bytes at a time.

Facts in, decisions out: `horovod.torch.gradients` brings the facts of all ranks together, so that
all decide alike.

- On an accelerator a bucket is reduced as soon as it is complete: the device works by itself.
- Between hosts too, where the first steps show that it is the network that takes the time, not the
  processor: backward hides it. How much goes at a time depends on the network as well: each bucket
  costs Python something, but everybody waits for the last one.
- Inside one host it depends on the cores and the model: a second thread costs Python's lock and a
  core. Where every core has a rank it is not tried, else the first steps show what is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

MEBIBYTE = 1 << 20

# On an accelerator: a quarter of all, so that most are on their way before backward ends.
LARGEST_BUCKET = 128 * MEBIBYTE
SMALLEST_BUCKET = 8 * MEBIBYTE
_SHARES = 4

SMALLEST_HOST_BUCKET = MEBIBYTE // 2  # inside a host

# Between hosts: what it takes this long to reduce. Measured with 1 Gbit/s (1 MiB) and more.
_BUCKET_SECONDS = 0.008
SMALLEST_NETWORK_BUCKET = MEBIBYTE
_PROCESSOR_RATE = 500e6  # bytes a second; a network that does more keeps a core busy
TRIAL_STEPS = 10  # all at once, of which the fastest counts: connections and memory warm up


def can_overlap(on_device: bool, over_network: bool, wanted: bool | None) -> bool:
    """Whether to reduce while backward goes on; `wanted` is what the user says."""
    return on_device or over_network if wanted is None else wanted


def device_bucket(total: int, limit: int) -> int:
    """Bytes of a bucket on an accelerator, of `total` bytes of gradients."""
    return min(limit, LARGEST_BUCKET, max(SMALLEST_BUCKET, total // _SHARES))


def host_bucket(total: int, limit: int) -> int:
    """Bytes of a bucket inside one host, where cores are to spare."""
    return min(limit, LARGEST_BUCKET, max(SMALLEST_HOST_BUCKET, total // _SHARES))


def network_bucket(total: int, limit: int, seconds: float) -> int:
    """Bytes of a bucket where reducing all `total` bytes at once takes so long."""
    if seconds <= 0:
        return min(limit, SMALLEST_BUCKET)
    moved = int(total * _BUCKET_SECONDS / seconds)
    return min(limit, LARGEST_BUCKET, max(SMALLEST_NETWORK_BUCKET, moved))


def pays_beside_backward(total: int, seconds: float) -> bool:
    """Whether reducing `total` bytes at once, in so many seconds, was waiting more than work.

    Work of the processor's takes as long beside backward as after it, and a bucket more of it.
    """
    return total < _PROCESSOR_RATE * seconds


def num_early(sizes: Sequence[int], hidden: float) -> int:
    """How many buckets, of these sizes, to reduce while backward still runs, if it hides so much.

    For when the next forward waits for one bucket after the other (overlap_forward). What comes
    first in backward is needed last, so that whatever backward does not hide had better go in the
    opposite order; buckets on their way cannot be overtaken.
    """
    begun = 0
    for number, size in enumerate(sizes):
        if number > 0 and begun + size / 2 > hidden:
            return number
        begun += size
    return len(sizes)
