"""``horovod.spark.run_elastic`` on a real cluster, while executors are killed and added."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import horovod.spark
from horovod.runner.functions.run_function import RemoteError
from tests.spark import functions
from tests.spark.cluster import StandaloneCluster, executor_on, newest_group, until
from tests.spark.training import Training

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start Java


class Job:
    """A call of `run_elastic` in a thread."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.training = Training(folder, lambda: "" if self.error is None else repr(self.error))
        self.results: list[Any] | None = None
        self.error: BaseException | None = None
        self._arguments = arguments
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results = horovod.spark.run_elastic(
                functions.train, (str(self.training.folder),), **self._arguments
            )
        except BaseException as error:
            self.error = error

    def stop(self) -> list[Any]:
        self.training.stop()
        self._thread.join(functions.HANG)
        assert self.error is None, self.error
        assert self.results is not None
        return self.results


def test_what_fails_is_replaced(whole: Any, tmp_path: Path):
    job = Job(tmp_path, num_proc=2, min_num_proc=1, max_num_proc=2)
    training = job.training
    before = training.until_size(2)
    (first,) = {pid for _, _, pid in training.log()}
    first_workers = training.workers()
    (victim,) = set(first_workers) - {first}
    executor = executor_on(first_workers[victim])
    assert executor.pid != executor_on(first_workers[first]).pid
    training.close_door()
    executor.kill()
    alone = training.until_size(1, before)
    training.open_door()
    together = training.until_size(2, alone)
    (new,) = set(training.workers()) - set(first_workers)
    training.close_door()
    training.fail(new)  # this time the worker alone; Spark starts its task again
    alone = training.until_size(1, together)
    training.open_door()
    together = training.until_size(2, alone)
    ((steps, rank),) = job.stop()
    assert rank == 0
    assert steps >= together
    assert {pid for _, _, pid in training.log()} == {first}, "it kept its process and its state"
    numbers = [step for step, _, _ in training.log()]
    assert set(numbers) == set(range(1, steps + 1)), "none is left out"
    assert len(set(training.workers().values())) == 4, "every attempt was a host of its own"


@pytest.fixture
def busy(whole: Any, tmp_path: Path) -> Iterator[None]:
    """All slots but one are taken, by another job."""
    marks = tmp_path / "busy"
    marks.mkdir()

    def occupy(number: int) -> None:
        (marks / str(number)).touch()
        until(lambda: (marks / "free").exists())

    context = whole.sparkContext
    job = threading.Thread(target=lambda: context.parallelize(range(3), 3).foreach(occupy))
    job.start()
    until(lambda: len(list(marks.iterdir())) == 3)
    yield
    (marks / "free").touch()
    job.join()


@pytest.mark.usefixtures("busy")
def test_executors_that_come_later_join(cluster: StandaloneCluster, tmp_path: Path):
    job = Job(tmp_path, num_proc=1, max_num_proc=2)
    training = job.training
    alone = training.until_size(1)
    worker = cluster.add_worker("worker-2", 2)
    try:
        training.until_size(2, alone)
        assert len(job.stop()) == 1
        hosts = sorted(training.workers().values())
        assert hosts[1].startswith("worker-2-")
    finally:
        cluster.remove(worker)


def test_a_cancelled_job(whole: Any, tmp_path: Path):
    job = Job(tmp_path, num_proc=1)
    job.training.until_size(1)
    whole.sparkContext.cancelJobGroup(newest_group(whole))
    until(lambda: job.error is not None, "the end of the job")
    assert isinstance(job.error, RemoteError)
    assert "Spark ended the tasks of horovod.spark.run. It says:" in str(job.error)
    assert "cancelled" in str(job.error)


def test_a_worker_that_fails_again_and_again(whole: Any):
    with pytest.raises(functions.Unhappy):
        horovod.spark.run_elastic(functions.fail_always, num_proc=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "1 <= min_num_proc <= num_proc <= max_num_proc"),
        ({"num_proc": 2, "max_num_proc": 1}, "these are 2, 2 and 1"),
        ({"num_proc": 1, "reset_limit": -1}, "reset_limit must not be negative"),
        ({"num_proc": 1, "elastic_timeout": 0}, "elastic_timeout must be more than 0"),
    ],
)
def test_wrong_arguments(spark: Any, arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        horovod.spark.run_elastic(functions.rank, **arguments)


def test_older_names(spark: Any):
    with (
        pytest.warns(DeprecationWarning, match="max_np is deprecated; use max_num_proc"),
        pytest.raises(ValueError, match="these are 2, 2 and 1"),
    ):
        horovod.spark.run_elastic(functions.rank, num_proc=2, max_np=1)
