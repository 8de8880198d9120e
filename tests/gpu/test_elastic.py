"""Elastic jobs on GPUs under the real ``horovodrun``, while workers are killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.accelerators import TEST_DEVICE, on_cpu
from tests.elastic.launched import Launched
from tests.gpu import LIMIT, SOON

pytestmark = pytest.mark.killing

SIZE = 3
OPTIONS = ["-H", f"localhost:{SIZE}", "--min-np", "2", "--max-np", str(SIZE), "-np", str(SIZE)]
OPTIONS += ["--max-worker-failures", "10"]


def await_steps(job: Launched, size: int) -> None:
    """Until ranks of a job of that size have made steps from now on."""
    said = len(job.output)
    expected = re.compile(rf"step \d+ worker w\d+ rank \d+ size {size}\b")
    job._await(lambda: expected.search(job.output, said), f"steps of {size} ranks")


def test_survivors_keep_their_processes_and_train_on(tmp_path: Path):
    """Each that is killed is rank 0, and the next one after it too."""
    kills = 2
    stop = tmp_path / "stop"
    program = ["-m", "tests.gpu.elastic_worker", str(stop), str(SIZE)]
    env = {TEST_DEVICE: "cpu"} if on_cpu() else {}
    with Launched(tmp_path / "job", OPTIONS, program=program, env=env, patience=LIMIT) as job:
        await_steps(job, SIZE)
        for number in range(kills):
            job.kill(f"w{number}")
            # The survivors go on, and take in another one as soon as it is there.
            job.await_event("formed", number + 1, ranks=SIZE)
            await_steps(job, SIZE)
        stop.touch()
        job.check_success(size=SIZE)
        ends = {f"w{number}" for number in range(kills, kills + SIZE)}
        assert set(job.ends()) == ends
        started = [event["worker"] for event in job.events("started")]
        assert len(started) == len(set(started)) == SIZE + kills, "nobody started twice"
        pids = {worker: int(pid) for pid, worker in re.findall(r"pid (\d+) of (w\d+)", job.output)}
        assert pids == {worker: job.pids()[worker] for worker in ends}
        times = [event["seconds"] for event in job.events("formed") if "seconds" in event]
        assert len(times) >= kills
        assert max(times) < SOON, str(job)
