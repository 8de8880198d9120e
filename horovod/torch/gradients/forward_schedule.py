"""Which buckets begin in backward where the next forward waits for them (overlap_forward).

What backward does not hide had better be reduced in the order in which the next forward needs it,
the opposite of backward's. Used by `horovod.torch.gradients.reducer` after a trial has shown how
fast the network is and how long backward takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.common.process_sets import ProcessSet
from horovod.torch.gradients.agreement import StepSamples
from horovod.torch.gradients.bucketing import LOOK_STEPS, hides_more, num_hidden
from horovod.torch.gradients.buckets import Bucket


class ForwardSchedule:
    """Divides the buckets of one optimizer into those that begin in backward and in the step.

    Args:
        buckets: Buckets, in the order in which backward completes them.
        seconds: The time that it takes to reduce all of them at once.
        backward: The time that backward takes from the first gradient on.
        process_set: The ranks that reduce them.
    """

    def __init__(
        self, buckets: Sequence[Bucket], seconds: float, backward: float, process_set: ProcessSet
    ) -> None:
        self._buckets = buckets
        self._num_bytes = sum(bucket.nbytes for bucket in buckets)
        self._rate = self._num_bytes / seconds  # bytes a second that the network brings
        self._hidden = self._rate * backward  # bytes that backward hides
        # Seconds for which the network had been idle when backward ended, while that is corrected.
        self._idle_times: StepSamples | None = StepSamples(LOOK_STEPS, process_set)
        self._divide()

    def correct(self, idle: float) -> None:
        """Let backward hide more if the network was idle for `idle` seconds when it ended."""
        samples = self._idle_times
        least = None if samples is None else samples.add_for_least(lambda: (idle,))
        if least is None:
            return
        more = hides_more(self._num_bytes, self._hidden, least[0], self._rate)
        if more is None:
            self._idle_times = None
        else:
            self._hidden = more
            self._divide()

    def _divide(self) -> None:
        """Mark the buckets that backward does not hide, so that they start in the step."""
        num_early = num_hidden([bucket.nbytes for bucket in self._buckets], self._hidden)
        for number, bucket in enumerate(self._buckets):
            bucket.is_held = number >= num_early


def by_need(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return buckets in the order in which to start them; those held come last, in reverse."""
    held = [bucket for bucket in buckets if bucket.is_held]
    return [bucket for bucket in buckets if not bucket.is_held] + held[::-1]


def idle_time(buckets: Sequence[Bucket], now: float) -> float:
    """Return for how many seconds nothing has been under way since the last reduction ended."""
    requests = [request for bucket in buckets for request in bucket.requests]
    if not requests or not all(request.done() for request in requests):
        return 0.0
    return now - max(request.finished_at for request in requests)
