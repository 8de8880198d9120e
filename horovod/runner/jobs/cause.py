"""Which rank made a fixed job fail, found from how its ranks ended and what they said about it.

`static_job` adds every failure. Order means little: a rank that is lost often ends after those that
failed because of it. They say so (`horovod.common.loss_note`), and whom they lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from horovod.runner.output.report import Exit, first_to_fail


class CauseFinder:
    """The failures of a job, in the order in which they were seen."""

    def __init__(self) -> None:
        self.failures: list[Exit] = []

    def add(self, failures: Iterable[Exit]) -> None:
        self.failures += failures

    def awaited(self, running: Collection[int]) -> set[int]:
        """Ranks that still run and are said to be the cause, where nobody failed by itself."""
        if any(one.because_of is None for one in self.failures):
            return set()
        return self._named() & set(running)

    def first(self) -> Exit | None:
        """Whose exit code and stderr tell most."""
        return first_to_fail(self.failures)

    def gone_early(self, exits: Sequence[Exit]) -> list[Exit]:
        """Ranks that ended well, or had only left Horovod, where nobody failed by itself."""
        if any(one.because_of is None for one in self.failures):
            return []
        guilty = self._named() - {one.rank for one in self.failures}
        ended = [one for one in exits if one.rank in guilty]
        return [one for one in ended if one.code == 0] or ended

    def _named(self) -> set[int]:
        return {rank for one in self.failures for rank in one.because_of or ()}
