"""``horovod.spark.run`` on a real cluster, whose two workers count as two hosts."""

from __future__ import annotations

import base64
import io
import os
import re
import stat
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest

import horovod.spark
from horovod.common.exceptions import TimeoutException
from horovod.runner.functions.run_function import RemoteError
from tests.files import contents
from tests.spark import functions
from tests.spark.cluster import (
    StandaloneCluster,
    executor_on,
    executors,
    newest_group,
    until,
)

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start the cluster


def agents() -> list[int]:
    """Agents of jobs on this machine that this process or its cluster has started."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        mine = (process.info["environ"] or {}).get("HOROVOD_TEST_CLUSTER") == str(os.getpid())
        if mine and "horovodrun-agent" in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def await_status(spark: Any, status: str) -> None:
    """Until Spark knows that the newest Horovod job ended like this; events take their time."""
    tracker = spark.sparkContext.statusTracker()

    def statuses() -> list[str]:
        jobs = tracker.getJobIdsForGroup(newest_group(spark))
        return [tracker.getJobInfo(job).status for job in jobs]

    until(lambda: statuses() == [status], f"the status {status}")


# -- what works ----------------------------------------------------------------------------


def test_horovod_runs_in_tasks(spark: Any):
    results = horovod.spark.run(functions.total, (10,), {"step": 2}, num_proc=2)
    assert [(rank, size) for rank, size, *_ in results] == [(0, 2), (1, 2)]
    assert [total for *_, total in results] == [22, 22]


def test_ranks_by_host_and_results_in_their_order(whole: Any):
    found = horovod.spark.run(functions.place, num_proc=4)
    assert [each["rank"] for each in found] == list(range(4))
    assert [each["size"] for each in found] == [4] * 4
    assert [each["local_rank"] for each in found] == [0, 1, 0, 1]
    assert [each["local_size"] for each in found] == [2] * 4
    assert [each["cross_rank"] for each in found] == [0, 0, 1, 1]
    assert [each["cross_size"] for each in found] == [2] * 4
    await_status(whole, "SUCCEEDED")


def test_as_many_as_spark_runs_at_once_by_default(spark: Any):
    assert horovod.spark.run(functions.rank) == [0, 1]


def test_the_environment_of_workers(spark: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONLY_OF_THE_DRIVER", "1")
    names = ["ONLY_OF_THE_DRIVER", "GIVEN", "SPARK_ENV_LOADED", "OMP_NUM_THREADS"]
    names += ["PYTHON_WORKER_FACTORY_SECRET", "HOROVOD_SPARK_TASK_GPUS"]
    (found,) = horovod.spark.run(
        functions.environment, names, num_proc=1, env={"GIVEN": "yes, with = and spaces"}
    )
    assert found["ONLY_OF_THE_DRIVER"] is None
    assert found["GIVEN"] == "yes, with = and spaces"
    assert found["SPARK_ENV_LOADED"] == "1", "that of the executor"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["PYTHON_WORKER_FACTORY_SECRET"] is None, "Spark's own secret stays with Spark"
    assert found["HOROVOD_SPARK_TASK_GPUS"] == ""


def test_no_gpus_where_spark_assigned_none(spark: Any):
    from horovod.spark.task import get_available_devices

    assert horovod.spark.run(get_available_devices, num_proc=1) == [[]]


def test_output_comes_to_the_driver(spark: Any, capsys: pytest.CaptureFixture[str]):
    out, err = io.StringIO(), io.BytesIO()
    horovod.spark.run(functions.speak, ("to files",), num_proc=2, stdout=out, stderr=err)
    assert sorted(out.getvalue().splitlines()) == [
        "[0]<stdout>:to files 0",
        "[1]<stdout>:to files 1",
    ]
    assert b"[1]<stderr>:to files 1\n" in err.getvalue()
    horovod.spark.run(
        functions.speak, ("hello",), num_proc=1, prefix_output_with_timestamp=True, verbose=2
    )
    said = capsys.readouterr()
    assert re.search(r"^\w+ \w+ +\d+ [\d:]+ \d{4}\[0\]<stdout>:hello 0$", said.out, re.MULTILINE)
    assert "[0]<stderr>:hello 0" in said.err
    assert "horovod.spark: rank 0 started on" in said.err
    assert "_HOROVOD_SECRET_KEY" not in said.err


def test_another_python(spark: Any, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nTHE_OTHER=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (found,) = horovod.spark.run(
        functions.environment, ["THE_OTHER"], num_proc=1, executable=str(python)
    )
    assert found == {"THE_OTHER": "1"}


def test_the_key_is_in_no_command_line_and_no_log(spark: Any, cluster: StandaloneCluster):
    ((key, lines),) = horovod.spark.run(functions.everything_visible, num_proc=1, verbose=2)
    assert len(key) == 44
    assert not any(key in line for line in lines)
    raw = base64.b64decode(key)
    events = Path(spark.conf.get("spark.eventLog.dir").removeprefix("file:"))
    files = {**contents(events), **contents(cluster.folder)}
    assert any("app-" in path.name for path in files)
    for path, content in files.items():
        assert key.encode() not in content, path
        assert raw not in content, path


# -- what fails ----------------------------------------------------------------------------


def test_a_function_that_raises_on_one_rank(spark: Any):
    with pytest.raises(functions.Unhappy) as caught:
        horovod.spark.run(functions.fail, (1,), num_proc=2)
    assert caught.value.args == (1, "on purpose")
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.rank == 1
    shown = "".join(traceback.format_exception(caught.value))
    assert "rank 1 on " in shown
    assert "functions.py" in shown, "the traceback there"
    await_status(spark, "FAILED")
    until(lambda: not agents())


def test_a_killed_executor(whole: Any, tmp_path: Path):
    def kill() -> None:
        files = [tmp_path / f"rank-{rank}" for rank in range(2)]
        until(lambda: all(file.exists() and " " in file.read_text() for file in files))
        worker = psutil.Process(int(files[1].read_text().split()[0]))
        executor_on(worker.environ()["HOROVOD_HOSTNAME"]).kill()

    before = executors(whole)
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RemoteError, match=r"lost: its Spark task or its executor ended"):
        # With a Python that starts its children itself, for its agent to end.
        horovod.spark.run(functions.hang, (str(tmp_path),), num_proc=2, executable=sys.executable)
    killer.join()
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    until(lambda: not agents())
    until(lambda: executors(whole) != before, "that Spark notices")


def test_more_processes_than_slots(whole: Any):
    with pytest.raises(TimeoutException) as caught:
        horovod.spark.run(functions.rank, num_proc=7, start_timeout=2)
    said = str(caught.value)
    assert "7 are needed at once" in said
    assert "within 2 s (start_timeout)" in said
    assert "offers 4 slots in 2 executors (127.0.0.1, 127.0.0.1)" in said
    assert horovod.spark.run(functions.rank, num_proc=1) == [0], "the slots are free again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "needs a function to call, not 3"),
        ({"args": (sys.stdout,)}, "cannot send the function"),
        ({"num_proc": 0}, "num_proc must be a whole number of at least 1, not 0"),
        ({"start_timeout": 0}, "start_timeout must be more than 0"),
        ({"env": {"A": 1}}, "env must map names to texts, but has 'A': 1"),
        ({"use_mpi": True}, "cannot use MPI.*horovodrun --mpi"),
        ({"use_mpi": True, "use_gloo": True}, "one of use_gloo and use_mpi"),
        ({"resource_profile": {"gpu": 1}}, "must be a pyspark.resource.ResourceProfile"),
        ({"nics": ["nosuch0"]}, "has no such interface with an address; it has .*lo"),
    ],
)
def test_wrong_arguments(spark: Any, arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        horovod.spark.run(**{"fn": functions.rank, **arguments})


def test_executors_that_lack_something(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bare = tmp_path / "bare"  # without any package
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other = tmp_path / "other"  # with another torch in front
    (tmp_path / "old" / "torch-1.2.3.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n"
    (tmp_path / "old" / "torch-1.2.3.dist-info" / "METADATA").write_text(metadata)
    other.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/old exec {sys.executable} "$@"\n')
    for file in (bare, other):
        file.chmod(stat.S_IRWXU)
    with pytest.raises(RuntimeError, match=r"the executor on \S+ has no torch for \S+/bare"):
        horovod.spark.run(functions.rank, num_proc=1, executable=str(bare))
    with pytest.raises(RuntimeError, match=r"on \S+ has torch 1\.2\.3 for .*, but the driver has"):
        horovod.spark.run(functions.rank, num_proc=1, executable=str(other))
    with pytest.raises(RuntimeError, match=r"Python '/nosuch/python' does not run"):
        horovod.spark.run(functions.rank, num_proc=1, executable="/nosuch/python")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
    with pytest.raises(RuntimeError, match=r"has no module '\w+': install Horovod"):
        horovod.spark.run(functions.rank, num_proc=1)
