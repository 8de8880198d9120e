"""Mistakes that the simulation must find: each is a change to the shipped code.

    python -m tests.simulation --mutants          # make simulate-mutants

Some bring back what users of Horovod 0.28.1 reported, others what this project had to mend. One
that survives is a promise that nobody checks.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake."""

    name: str
    module: str
    before: str
    after: str

    @property
    def patches(self) -> dict[str, tuple[tuple[str, str], ...]]:
        return {self.module: ((self.before, self.after),)}


MUTANTS = (
    Mutant(
        "a decision does not wake those who wait for it",
        "horovod.common.membership",
        "            self._changed.notify_all()\n            if generation is None or not",
        "            if generation is None or not",
    ),
    Mutant(
        "the store does not wake its thread for a key that the launcher sets",
        "horovod.common.store_server",
        "            self._changed_keys.append(key)\n            self._wake()",
        "            self._changed_keys.append(key)",
    ),
    Mutant(
        "training goes on with fewer workers than the minimum",
        "horovod.common.membership",
        "if slot is None or decision.too_few:",
        "if slot is None:",
    ),
    Mutant(
        "a commit is not counted",
        "horovod.common.elastic",
        "        self.save()\n        self._version += 1\n        verdict = self._agree()",
        "        self.save()\n        verdict = self._agree()",
    ),
    Mutant(
        "a commit takes no snapshot",
        "horovod.common.elastic",
        "        self.save()\n        self._version += 1\n        verdict = self._agree()",
        "        self._version += 1\n        verdict = self._agree()",
    ),
    Mutant(
        "a generation that broke is entered again",
        "horovod.common.membership",
        "                attempt += 1",
        "                break",
    ),
    Mutant(
        "the job ends when its discovery fails once",
        "horovod.runner.elastic.mailbox",
        "            elif not state.hosts_known:",
        "            else:",
    ),
    Mutant(
        "workers that are lost with their host are not noticed",
        "horovod.runner.elastic.failures",
        '                self._note(process, -signal.SIGKILL, "lost with its host")',
        "                pass",
    ),
    Mutant(
        "a worker that was told to leave counts as failed",
        "horovod.runner.elastic.driver",
        "expected = process.is_dismissed or removed or (process.is_leaving and code == 0)",
        "expected = process.is_dismissed or removed",
    ),
    Mutant(
        "a lost driver is not noticed by its workers",
        "horovod.common.membership",
        "                    self._lose_driver(error)\n",
        "",
    ),
    Mutant(
        "who has left says nothing to those who meet",
        "horovod.common.membership",
        '            self.set(_OVER, b"")',
        "            pass",
    ),
    Mutant(
        "a broken connection to the store is used again",
        "horovod.common.store_client",
        "        stream.close()\n        self._local.stream = None",
        "        stream.close()",
    ),
    Mutant(
        "a wait in the store has no end",
        "horovod.common.store_server",
        "        while self._deadlines and self._deadlines[0][0] <= now:",
        "        while False:",
    ),
)
