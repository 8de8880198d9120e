"""Mistakes that jobs with fixed ranks must find, and those of the agents: see `mutants`."""

from __future__ import annotations

from tests.simulation.mutants import Mutant

_AGENT = "horovod.runner.agents.agent"
_AGENT_SET = "horovod.runner.agents.agent_set"
_FIXED = "horovod.runner.jobs.fixed_ranks"
_REPORT = "horovod.runner.output.report"

FIXED_MUTANTS = (
    Mutant(
        "the launcher blames the last failure in place of the first",
        "new",
        _REPORT,
        "        return first_to_fail(self.failures)",
        "        return self.failures[-1] if self.failures else None",
    ),
    Mutant(
        "the launcher blames whoever ends first",
        "past",
        _REPORT,
        "    return next(iter(killed or failed), None)",
        "    return next((one for one in batch if one.code != 0), None)",
    ),
    Mutant(
        "an agent that lost the launcher leaves its workers running",
        "new",
        _AGENT,
        "        self._poller.unregister(fd)\n        self._end(ORPHAN_GRACE)",
        "        self._poller.unregister(fd)\n        os._exit(0)",
    ),
    Mutant(
        "a fixed job goes on without a lost rank",
        "new",
        _FIXED,
        "        if self._cause.failures and not stopping:\n            self._look_for_cause()",
        "        pass",
    ),
    Mutant(
        "a fixed job goes on without a lost host",
        "new",
        _FIXED,
        "                Colour.FAILURE,\n            )\n            self._stop_ranks()",
        "                Colour.FAILURE,\n            )",
    ),
    Mutant(
        "the exit status of a killed worker is taken for 0",
        "new",
        _AGENT,
        "exits.append((worker.number, os.waitstatus_to_exitcode(status)))",
        "exits.append((worker.number, status >> 8))",
    ),
    Mutant(
        "an agent does not kill who ignores SIGTERM",
        "new",
        _AGENT,
        "        self._kill_all()\n        return False\n",
        "        self._deadline = None\n        return False\n",
    ),
    Mutant(
        "an agent gives no sign of life",
        "past",
        "horovod.runner.agents.agent_streams",
        "_PULSE = 30.0",
        "_PULSE = 1e9",
    ),
    Mutant(
        "an agent ends before its workers",
        "new",
        _AGENT,
        "        while self._reap() or not self._closing:",
        "        while not self._closing:",
    ),
    Mutant(
        "a rank that hangs is blamed before it has ended",
        "past",
        _FIXED,
        "            self._job.call_later(FAILURE_GRACE + _BLAME_WINDOW, self._blame)",
        "            self._blame()",
    ),
    Mutant(
        "ranks that wait for one that hangs do not name it",
        "past",
        "horovod.observe.statistics.stall",
        "HorovodInternalError(why, ranks=silent)",
        "HorovodInternalError(why)",
    ),
    Mutant(
        "ranks that wait for one that never came do not name it",
        "past",
        "horovod.engine.runtime",
        "[launched[rank] for rank in error.ranks] if launched else error.ranks",
        "[]",
    ),
    Mutant(
        "a host that does not answer is waited for without end",
        "new",
        _AGENT_SET,
        "            agent.give_up(f",
        "            str(f",
    ),
)
