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
        "        failure = first_to_fail(self.failures)",
        "        failure = self.failures[-1] if self.failures else None",
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
        "ranks that wait for one that hangs do not name it",
        "past",
        "horovod.observe.statistics.stall",
        "HorovodInternalError(why, ranks=sorted(guilty))",
        "HorovodInternalError(why)",
    ),
    Mutant(
        "a rank that hangs in an operation which nobody finishes without it is not named",
        "past",
        "horovod.observe.statistics.stall",
        "    return find_hanging(reports) or find_behind(reports)",
        "    return find_behind(reports)",
    ),
    Mutant(
        "ranks that wait for one that never came do not name it",
        "past",
        "horovod.engine.runtime",
        "[launched[rank] for rank in error.ranks] if launched else error.ranks",
        "[]",
    ),
    Mutant(
        "ranks that could not connect do not say whom they missed",
        "past",
        "horovod.engine.runtime",
        "                job.note_loss(error.ranks)",
        "                pass",
    ),
    Mutant(
        "a rank that names one at a cut link is blamed in place of it",
        "past",
        _REPORT,
        "        if failure is None:\n            return None\n",
        "        return first_to_fail(self.failures)\n",
    ),
    Mutant(
        "a rank that waited is blamed in place of one that hung for a while",
        "past",
        _REPORT,
        "        return max(circle, key=self._suspicion)",
        "        return failure",
    ),
    Mutant(
        "ranks that have run an operation are blamed by those in the middle of it",
        "past",
        "horovod.observe.statistics.stall",
        "    return find_hanging(reports) or find_behind(reports)",
        "    return reports.keys() - find_behind(reports)",
    ),
    Mutant(
        "those who waited for a rank that cannot be ended are blamed",
        "past",
        _FIXED,
        "        if self._cause.awaited(self._running):",
        "        if False:",
    ),
    Mutant(
        "those who waited for a rank on the launcher's host that cannot be ended are blamed",
        "past",
        _FIXED,
        "if self._cause.awaited(ranks) or (agent.remote and not self._job.is_ending):",
        "if agent.remote:",
    ),
    Mutant(
        "the workers of an agent that was killed are left running",
        "past",
        "horovod.runner.agents.controller",
        "            self._sweep(agent, list(pids.values()))",
        "            pass",
    ),
    Mutant(
        "an agent that is stopped is waited for without end",
        "past",
        "horovod.runner.agents.supervise",
        "agent.silent_checks > _MOST_SILENT_CHECKS",
        "agent.silent_checks < 0",
    ),
    Mutant(
        "an agent that is stopped is left on its host",
        "new",
        "horovod.runner.agents.local_host",
        "        signal_all([agent], _SIGKILL)",
        "        pass",
    ),
    Mutant(
        "an agent waits for its source without end",
        "past",
        "horovod.runner.agents.starters",
        "_signal.alarm({_SOURCE_SECONDS})",
        "_signal.alarm(0)",
    ),
    Mutant(
        "a host that does not answer is waited for without end",
        "new",
        _AGENT_SET,
        "            agent.give_up(f",
        "            str(f",
    ),
)
