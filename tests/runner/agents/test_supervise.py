"""The launcher's loop with a job that grows: hosts and workers join while others run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from horovod.runner.agents.host_agent import HostAgent, WorkerSpec
from horovod.runner.agents.supervise import Supervisor
from horovod.runner.output.console import Console
from horovod.runner.output.outputs import Outputs

ENV = {"PATH": os.environ["PATH"]}


class Growing:
    """Workers 0 and 1 on two hosts; when both have ended, a third host joins with worker 2."""

    def __init__(self, supervisor: Supervisor, outputs: Outputs) -> None:
        self.supervisor = supervisor
        self.outputs = outputs
        self.agents: list[HostAgent] = []
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.called = False
        self.join()
        self.join()

    def join(self) -> None:
        self.agents.append(HostAgent(f"host{len(self.agents)}"))
        self.supervisor.add(self.agents[-1])

    def ready(self, agent: HostAgent) -> None:
        number = self.agents.index(agent)
        self.outputs.open(number, 10 + number)
        program = f"print('from', {number})\nraise SystemExit({number})"
        agent.start([WorkerSpec(number, [sys.executable, "-c", program], {}, "/")], ENV)

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        raise AssertionError("nobody asked")

    def started(self, agent: HostAgent, worker: int, pid: int) -> None:
        self.pids[worker] = pid

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        raise AssertionError(f"{worker} did not start: {os.strerror(number)} {what}")

    def exited(self, agent: HostAgent, exits: Sequence[tuple[int, int]]) -> None:
        self.codes.update(exits)
        if len(self.codes) == 2:
            self.supervisor.call_later(0.0, self.later)
        elif len(self.codes) == 3:
            for each in self.agents:
                each.finish()

    def later(self) -> None:
        self.called = True
        self.join()

    def lost(self, agent: HostAgent, code: int) -> None:
        raise AssertionError(f"{agent.name} was lost: {agent.last_words}")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Path, Console]]:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        yield tmp_path, Console(out.fileno(), err.fileno())


def test_hosts_and_workers_join_while_the_loop_runs(files: tuple[Path, Console]):
    folder, console = files
    outputs = Outputs(console, shown=[10, 12])
    supervisor = Supervisor(console, outputs)
    try:
        job = Growing(supervisor, outputs)
        supervisor.run(job)
    finally:
        supervisor.close()
    assert job.called
    assert job.codes == {0: 0, 1: 1, 2: 2}
    assert sorted(job.pids) == [0, 1, 2]
    shown = sorted((folder / "out").read_text().splitlines())
    assert shown == ["[10]<stdout>:from 0", "[12]<stdout>:from 2"]
