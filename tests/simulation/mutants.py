"""Mistakes that the simulation must find: each is a change to the shipped code.

    python -m tests.simulation --mutants          # make simulate-mutants

Some bring back what users of Horovod 0.28.1 reported (its issue's number), others what this project
had to mend. One that survives is a promise that nobody checks.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake."""

    name: str
    origin: str  # "upstream" and a number, "past" of this project, or "new"
    module: str
    before: str
    after: str

    @property
    def patches(self) -> dict[str, tuple[tuple[str, str], ...]]:
        return {self.module: ((self.before, self.after),)}


_CHECKPOINT = "horovod.torch.elastic.checkpoint"
_ELASTIC = "horovod.common.elastic"
_GENERATION = "horovod.common.generations.generation"
_MEMBERSHIP = "horovod.common.generations.membership"
_NEGOTIATION = "horovod.engine.agreement.negotiation"
_POLICY = "horovod.runner.elastic.policy"
_RUNTIME = "horovod.engine.runtime"
_STATE = "horovod.torch.elastic.state"
_TERMINATION = "horovod.runner.elastic.termination"

MUTANTS = (
    # -- what users of Horovod 0.28.1 reported -----------------------------------------------
    Mutant(
        "below its minimum a job waits for as many new workers as the minimum",
        "upstream 3494",
        _POLICY,
        "if len(keep) + len(since) < limits.min_np or",
        "if len(since) < limits.min_np or",
    ),
    Mutant(
        "the loss of a worker ends the job",
        "upstream 3852",
        _TERMINATION,
        "    if are_all_lost(state):\n        ending",
        "    if state.failures:\n        return Ending(failure=state.last_failure)\n"
        "    if are_all_lost(state):\n        ending",
    ),
    Mutant(
        "the sampler counts only the samples of one rank",
        "upstream 3143",
        "horovod.torch.elastic.sampler",
        "self._record(batch_size * self.num_replicas)",
        "self._record(batch_size)",
    ),
    Mutant(
        "a sampler does not go back with its model",
        "upstream 3399",
        _STATE,
        "        for handler in self._handlers.values():\n            handler.restore()",
        "",
    ),
    Mutant(
        "a sampler keeps its own count when the ranks change",
        "upstream 3399",
        _STATE,
        "        self.value.load_state_dict(state)\n\n    def gather",
        "\n    def gather",
    ),
    Mutant(
        "process sets are not made again in the next generation",
        "upstream 4021",
        _RUNTIME,
        "                self._open_wanted_sets(job)\n",
        "",
    ),
    Mutant(
        "process sets are made in generations that are too small for them",
        "upstream 4021",
        _RUNTIME,
        "            if ranks[-1] < job.topology.size:\n",
        "            if ranks:\n",
    ),
    Mutant(
        "survivors end when a collective fails",
        "upstream 3111, 3264",
        _ELASTIC,
        "                    if not job.can_recover(error):\n                        raise",
        "                    raise",
    ),
    Mutant(
        "survivors end if nothing was committed yet",
        "upstream 2484",
        _MEMBERSHIP,
        "if times >= _MOST_FRUITLESS and",
        "if times and",
    ),
    # -- what this project had to mend ---------------------------------------------------------
    Mutant(
        "a worker that lost the driver ends as if its script had failed",
        "past",
        _MEMBERSHIP,
        "        if self._has_lost_driver:\n            raise SystemExit(DRIVER_LOST)",
        "        if self._has_lost_driver:\n            raise SystemExit(1)",
    ),
    Mutant(
        "a worker that never reached the driver ends as if its script had failed",
        "past",
        _MEMBERSHIP,
        "worker_id, error)\n    raise SystemExit(DRIVER_LOST) from error",
        "worker_id, error)\n    raise SystemExit(1) from error",
    ),
    Mutant(
        "a worker that leaves out of the driver's reach seems to have trained to the end",
        "past",
        _MEMBERSHIP,
        "            raise SystemExit(DRIVER_LOST) from error\n        raise SystemExit(0)",
        "            pass\n        raise SystemExit(0)",
    ),
    Mutant(
        "nobody says that a worker is lost which the newest decision has left out",
        "past",
        "horovod.runner.elastic.job_state",
        " or (process.joined and not self.is_formed):",
        ":",
    ),
    Mutant(
        "a request fails because its connection broke while it was idle",
        "past",
        "horovod.common.store.client",
        "            self._forget()\n            stream = self._stream()\n",
        "            raise\n",
    ),
    Mutant(
        "workers that lost their slot before they learned of it wait for ever",
        "past",
        "horovod.runner.elastic.driver",
        "self._state.unaware_workers()",
        "()",
    ),
    Mutant(
        "two broken connections within one wait count as the loss of the driver",
        "past",
        _MEMBERSHIP,
        "                self.store.try_get(LATEST)\n",
        "                self.store.get(decision_key(self.newest.number + 1), _WATCH_SLICE)\n"
        "            except TimeoutError:\n                continue\n",
    ),
    Mutant(
        "a worker is given up because of a decision from before it joined",
        "past",
        "horovod.runner.elastic.job_state",
        "if p.joined is not None and p.joined <= number]",
        "if p.joined is not None]",
    ),
    Mutant(
        "a worker that loses the store while it meets others ends with an error",
        "past",
        _MEMBERSHIP,
        "except (HorovodInternalError, TimeoutError, ConnectionError) as error:",
        "except (HorovodInternalError, TimeoutError) as error:",
    ),
    Mutant(
        "nobody says why a job fails whose workers have trained to the end",
        "past",
        _TERMINATION,
        "        return Ending(_describe_bad_end(state.bad_end), state.bad_end)",
        "        return Ending(failure=state.bad_end)",
    ),
    Mutant(
        "a worker that was lost before it ran counts as one that cannot be started",
        "past",
        _TERMINATION,
        "if all(exit.pid == 0 and exit.code > 0 for exit in exits):",
        "if all(exit.pid == 0 for exit in exits):",
    ),
    Mutant(
        "a job begins without hosts that have just connected",
        "past",
        _POLICY,
        "hosts_to_come = not keep and (state.hosts_connecting or is_empty_host)",
        "hosts_to_come = not keep and state.hosts_connecting",
    ),
    Mutant(
        "those who have the state leave before others have it",
        "past",
        _POLICY,
        "    if any(worker in stay for worker in holders):",
        "    if stay:",
    ),
    Mutant(
        "workers of a decision that never formed count as having the state",
        "past",
        _POLICY,
        "    if any(worker in stay for worker in holders):",
        "    if any(state.is_formed or worker.joined != state.number for worker in stay):",
    ),
    Mutant(
        "those who may just form the first generation leave before it has formed",
        "past",
        _POLICY,
        " if worker.has_state] or oldest\n",
        " if worker.has_state] or members\n",
    ),
    Mutant(
        "new workers count as having the state before they have received it",
        "past",
        _POLICY,
        " if worker.has_state] or oldest\n",
        " if state.is_formed or worker.joined <= state.last_formed] or oldest\n",
    ),
    Mutant(
        "a worker that lost its slot leaves before the others have met",
        "past",
        _MEMBERSHIP,
        "        if not self.holds_state or decision.is_final:\n",
        "        if True:\n",
    ),
    Mutant(
        "workers that lost their slot do not count when all others are lost",
        "past",
        "horovod.runner.elastic.job_state",
        "        if self.is_over or any(p.has_state for p in placed):\n            return placed\n",
        "        if True:\n            return placed\n",
    ),
    Mutant(
        "workers that lost their slot count only when nobody else is left",
        "past",
        "horovod.runner.elastic.job_state",
        "return [p for p in alive if (p.has_state or p.number in in_decision) and not p.is_ending]",
        "return placed or [p for p in alive if p.has_state and not p.is_ending]",
    ),
    Mutant(
        "a worker that lost its slot leaves at once below the minimum",
        "past",
        _MEMBERSHIP,
        "            while not (found or self.leaving) and time",
        "            while not (found or self.leaving or decision.too_few) and time",
    ),
    Mutant(
        "a worker that lost its slot gives it away though it has chosen its device",
        "past",
        "horovod.runner.elastic.job_state",
        "other.index == index and not other.has_met",
        "other.index == index",
    ),
    Mutant(
        "ranks that have connected wait for the others without end",
        "past",
        "horovod.transport.network.tcp",
        "        self._deadline = time.monotonic() + seconds\n",
        "        self._deadline = None\n",
    ),
    Mutant(
        "a generation does not count as formed if the next decision was made meanwhile",
        "past",
        "horovod.runner.elastic.mailbox",
        "        state.mark_formed(number)\n",
        "        if number == state.number:\n            state.mark_formed(number)\n",
    ),
    Mutant(
        "a decision does not wake those who wait for it",
        "past",
        _MEMBERSHIP,
        "            self._changed.notify_all()\n            if generation is None or not",
        "            if generation is None or not",
    ),
    Mutant(
        "the store does not wake its thread for a key that the launcher sets",
        "past",
        "horovod.common.store.server",
        "            self._changed_keys.append(key)\n            self._wake()",
        "            self._changed_keys.append(key)",
    ),
    Mutant(
        "whoever waits for the background thread is not woken",
        "past",
        "horovod.engine.agreement.waiters",
        "                self._progress.notify_all()",
        "                pass",
    ),
    Mutant(
        "requests are left waiting when their channel fails",
        "past",
        "horovod.engine.channel",
        "        self._executor.abort(str(error))\n        for request in left:\n"
        "            request.fail(error)",
        "        self._executor.abort(str(error))",
    ),
    Mutant(
        "ranks that have joined contribute ones",
        "past",
        _NEGOTIATION,
        "        value = identity_like(dtype, reduction.op)",
        "        value = 1",
    ),
    Mutant(
        "nobody stands in for ranks that have joined",
        "past",
        _NEGOTIATION,
        "        if not absent <= joined:",
        "        if absent:",
    ),
    Mutant(
        "a broken connection to the store is used again",
        "past",
        "horovod.common.store.client",
        "            stream.close()\n        self._local.stream = None",
        "            stream.close()",
    ),
    Mutant(
        "a worker that was told to leave counts as failed",
        "past",
        "horovod.runner.elastic.driver",
        "expected = process.is_dismissed or removed or (process.is_leaving and code == 0)",
        "expected = process.is_dismissed or removed",
    ),
    Mutant(
        "a thread whose request another one fails does not sleep until then",
        "past",
        "horovod.engine.channel",
        "                self.wait_beside(request, _MOMENT)",
        "                pass",
    ),
    Mutant(
        "a replacement gets its local rank by age, and with it a device that is in use",
        "past",
        _POLICY,
        "        in_slot_order = sorted(workers, key=lambda w: w.index)",
        "        in_slot_order = workers",
    ),
    Mutant(
        "a worker that has chosen a device does not say so",
        "past",
        _GENERATION,
        "            self._keep_slot()",
        "            pass",
    ),
    # -- commits on disk ----------------------------------------------------------------------
    Mutant(
        "a checkpoint gets its name before its content is on disk",
        "new",
        _CHECKPOINT,
        "                os.fsync(file.fileno())\n",
        "",
    ),
    Mutant(
        "the name of a checkpoint is not on disk",
        "new",
        _CHECKPOINT,
        "            os.fsync(directory)  # the name, too, has to be on disk",
        "            pass",
    ),
    Mutant(
        "a commit counts as written before it is",
        "new",
        _CHECKPOINT,
        "self._changed.wait_for(lambda: not (self._waiting or self._busy), timeout)",
        "True",
    ),
    Mutant(
        "a job that begins anew does not read the newest checkpoint",
        "new",
        _STATE,
        "        found = newest_checkpoint(self._checkpoint_dir)",
        "        found = None",
    ),
    # -- others ----------------------------------------------------------------------------------
    Mutant(
        "training goes on with fewer workers than the minimum",
        "new",
        _MEMBERSHIP,
        "if slot is None or decision.too_few:",
        "if slot is None:",
    ),
    Mutant(
        "a commit is not counted",
        "new",
        _ELASTIC,
        "        self.save()\n        self._version += 1\n        verdict = self._agree()",
        "        self.save()\n        verdict = self._agree()",
    ),
    Mutant(
        "a commit takes no snapshot",
        "new",
        _ELASTIC,
        "        self.save()\n        self._version += 1\n        verdict = self._agree()",
        "        self._version += 1\n        verdict = self._agree()",
    ),
    Mutant(
        "nobody goes back to the last commit",
        "new",
        _ELASTIC,
        "                    state.restore()\n                except HostsUpdated",
        "                except HostsUpdated",
    ),
    Mutant(
        "rank 0 gives its state to all, whoever has the newest",
        "new",
        "horovod.elastic.worker",
        "        return (version << _RANK_BITS) - int(newest), version",
        "        return 0, version",
    ),
    Mutant(
        "a generation that broke is entered again",
        "new",
        _GENERATION,
        "        attempt += 1",
        "        break",
    ),
    Mutant(
        "who has left says nothing to those who meet",
        "new",
        _GENERATION,
        '            self.set(_OVER, b"")',
        "            pass",
    ),
    Mutant(
        "a decision without a worker does not break the generation",
        "new",
        _MEMBERSHIP,
        "        self.on_break(generation.broken or decision.reason, generation)",
        "",
    ),
    Mutant(
        "a lost driver is not noticed by its workers",
        "new",
        _MEMBERSHIP,
        "                if not self._finished:\n                    self._lose_driver(error)\n"
        "                return\n",
        "                if self._finished:\n                    return\n",
    ),
    Mutant(
        "the job ends when its discovery fails once",
        "new",
        "horovod.runner.elastic.mailbox",
        "            elif not state.hosts_known:",
        "            elif True:",
    ),
    Mutant(
        "workers that are lost with their host are not noticed",
        "new",
        "horovod.runner.elastic.liveness",
        '                self._note(process, -signal.SIGKILL, "lost with its host")',
        "                pass",
    ),
    Mutant(
        "workers that do not hear a decision are not given up",
        "new",
        "horovod.runner.elastic.liveness",
        "        late = self._state.unresponsive_workers(number)",
        "        return",
    ),
    Mutant(
        "workers whose program hangs are not given up",
        "new",
        "horovod.runner.elastic.liveness",
        '        if decision.too_few or decision.kind not in ("failure", "start"):',
        "        if True:",
    ),
    Mutant(
        "every decision gives workers whose program hangs more time",
        "past",
        "horovod.runner.elastic.liveness",
        "        if self._state.too_few:",
        "        if decision.number != self._state.number:\n            return\n"
        "        if self._state.too_few:",
    ),
    Mutant(
        "the stall inspector ends nothing",
        "new",
        "horovod.observe.statistics.stall",
        "        fatal = 0 < self._shut_down_after < waited",
        "        fatal = False",
    ),
    Mutant(
        "a wait in the store has no end",
        "new",
        "horovod.common.store.parked_requests",
        "        while self._deadlines and self._deadlines[0][0] <= now:",
        "        while False:",
    ),
    Mutant(
        "every rank runs what was negotiated in its own order",
        "new",
        _NEGOTIATION,
        "        return Negotiated(ready=[own[name] for name in findings])",
        "        return Negotiated(ready=[each for each in queue if each.name in findings])",
    ),
    Mutant(
        "ranks agree on what only some have submitted",
        "new",
        "horovod.transport.network.tcp",
        "            return count_common_words([words_of(record) for record in records])",
        "            return len(words) // WORD",
    ),
)
