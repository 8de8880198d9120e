"""Other sessions than the shared one: none, Spark Connect's, ``local[2]`` and ``local-cluster``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.spark.cluster import HANG, QUICK_JAVA, REPOSITORY, spark_environment, until
from tests.spark.training import Training

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start Java
CALL = "import horovod.spark; horovod.spark.run(lambda: None)"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "needs an active SparkContext, and this process has none: create a session first"),
        # What PySpark sets in a process that has such a session.
        ({"SPARK_CONNECT_MODE_ENABLED": "1"}, "cannot use a Spark Connect session.*spark-submit"),
    ],
)
def test_without_a_context(variables: dict[str, str], message: str):
    done = subprocess.run(
        [sys.executable, "-c", CALL],
        env={**spark_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"RuntimeError: .*{message}", last), done.stderr


class Program:
    """`tests.spark.program` in a process of its own, and the lines that it has said."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err = folder / "out", folder / "err"
        for name in ("elastic", "first", "second"):
            (folder / name).mkdir()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.program", str(folder)],
                env=spark_environment(),
                cwd=REPOSITORY,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def await_fact(self, name: str) -> Any:
        until(lambda: name in self.facts() or self.process.poll() is not None)
        assert name in self.facts(), self.err.read_text()
        return self.facts()[name]

    def problem(self) -> str:
        return self.err.read_text() if self.process.poll() is not None else ""

    def facts(self) -> dict[str, Any]:
        lines = [line for line in self.out.read_text().splitlines() if line.startswith("{")]
        return {name: value for line in lines for name, value in json.loads(line).items()}


def pids_in(folder: Path) -> list[int]:
    """The ranks that hang, and their children, once both ranks are there."""
    files = [folder / f"rank-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and " " in file.read_text() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def _fail_and_recover(training: Training) -> None:
    """Here Spark would end the job after one failure, so tasks begin again by themselves."""
    together = training.until_size(2)
    (victim,) = set(training.workers()) - {pid for _, _, pid in training.log()}
    training.close_door()
    training.fail(victim)
    alone = training.until_size(1, together)
    training.open_door()
    training.until_size(2, alone)
    training.stop()


def test_a_driver_that_is_interrupted_and_then_killed(tmp_path: Path):
    program = Program(tmp_path)
    try:
        assert program.await_fact("ranks") == [0, 1]
        assert "needs 3 Spark tasks at once" in program.await_fact("too_many")
        assert "offers 2 slots (local[2])" in program.await_fact("too_many")
        _fail_and_recover(Training(tmp_path / "elastic", program.problem))
        assert program.await_fact("elastic") == 1
        pids = pids_in(tmp_path / "first")
        os.kill(program.process.pid, signal.SIGINT)
        program.await_fact("interrupted")
        until(lambda: not any(map(psutil.pid_exists, pids)), "the end of all processes")
        pids = pids_in(tmp_path / "second")
        program.process.kill()
        until(lambda: not any(map(psutil.pid_exists, pids)), "the end of all processes")
    finally:
        program.process.kill()
        program.process.wait()


GPUS = """
import sys
from pyspark.sql import SparkSession
import horovod.spark
from horovod.spark.task import get_available_devices
SparkSession.builder.getOrCreate()
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from horovod.runner.common.util.timeout import TimeoutException
found = horovod.spark.run(get_available_devices, num_proc=2)
assert sorted(found) == [["3"], ["5"]], found
# Another job of the same session: both GPUs for one task.
profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1).resource("gpu", 2)).build
both = horovod.spark.run(get_available_devices, num_proc=1, resource_profile=profile)
assert sorted(both[0]) == ["3", "5"], both
try:
    horovod.spark.run(get_available_devices, num_proc=2, resource_profile=profile, start_timeout=3)
except TimeoutException as error:
    assert "offers 1 slot in 1 executor" in str(error), error
    assert "2 gpu for each task (resource_profile)" in str(error), error
else:
    sys.exit("there are no four GPUs")
"""


def test_gpus_that_spark_assigned(tmp_path: Path):
    script = tmp_path / "gpus"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["3", "5"]}'\n""")
    script.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(GPUS)
    submit = Path(sys.executable).parent / "spark-submit"
    settings = {
        "spark.ui.enabled": "false",
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "1",
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.executor.extraJavaOptions": QUICK_JAVA,
    }
    pairs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    done = subprocess.run(
        [str(submit), "--master", "local-cluster[1,2,1024]", *pairs, str(program)],
        env=spark_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr[-5000:]
