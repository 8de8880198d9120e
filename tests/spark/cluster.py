"""A real Spark cluster on this machine, for tests: a standalone master and two workers.

All are processes of their own. `tests.spark.conftest` starts one `StandaloneCluster` for the whole
session; the estimators' tests use it as well.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.forked_client import AGENT_NAME
from tests.forked_python import forked_python
from tests.spark.java_archive import ARCHIVE

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HANG = 600.0  # seconds: only what never happens takes so long
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # to start, which is most of what we do
if ARCHIVE.exists():  # of another Java it is of no use, which is not worth a line among the output
    QUICK_JAVA += f" -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable"
FORKED_DAEMON = "spark.python.daemon.module=tests.spark.forked_daemon"

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_REGISTERED = "Successfully registered with master"
_ATTEMPTS = 3


def spark_environment() -> dict[str, str]:
    """For every process of Spark: on loopback, with this Python and this Horovod."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HOROVOD_START_TIMEOUT": "300",
        "HOROVOD_TEST_CLUSTER": str(os.getpid()),  # tells our processes from those of others
    }


def forked_environment() -> dict[str, str]:
    """For programs whose Python, as that of their tasks and ranks, is forked: `forked_python`."""
    python = forked_python()[0]
    options = f'--conf spark.driver.extraJavaOptions="{QUICK_JAVA}" --conf spark.ui.enabled=false'
    return {
        **spark_environment(),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
        "PYSPARK_SUBMIT_ARGS": f"{options} --conf {FORKED_DAEMON} pyspark-shell",
        AGENT_NAME: python,
    }


def until(done: Callable[[], bool], what: str = "what was waited for") -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def newest_group(spark: Any) -> str:
    """The name of the group of the newest Horovod job."""
    tracker = spark.sparkContext.statusTracker()
    newest = 0
    while tracker.getJobIdsForGroup(f"horovod.spark.run.{newest + 1}"):
        newest += 1
    return f"horovod.spark.run.{newest}"


def executors(spark: Any) -> list[str]:
    """The addresses of the driver and of the executors. A new one has another."""
    infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return [f"{info.host()}:{info.port()}" for info in infos]


def executor_on(host: str) -> psutil.Process:
    """The executor on the host with a rank's name of it, to which elastic jobs add numbers."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        if _EXECUTOR in (process.info["cmdline"] or []):
            name = (process.info["environ"] or {}).get("HOROVOD_HOSTNAME", "?")
            if host == name or host.startswith(f"{name}-"):
                return process
    raise AssertionError(f"there is no executor on {host}")


class Daemon:
    """A process that serves others until it is stopped: of Spark, or of HDFS."""

    def __init__(self, folder: Path, name: str, *command: str, env: Mapping[str, str]) -> None:
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )

    def until(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """Wait until the log has a line like this."""
        deadline = time.monotonic() + HANG
        while True:
            text = self._log.read_text(errors="replace")
            found = re.search(pattern, text)
            if found:
                return found
            assert self.process.poll() is None, f"it ended:\n{text}"
            assert time.monotonic() < deadline, f"it does not start:\n{text}"
            time.sleep(0.05)

    def stop(self) -> None:
        """With everything that it started: executors are in its session."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class StandaloneCluster:
    """A master and two workers with two slots each.

    Executors of the two workers count as two hosts, because their environments say so.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[Daemon] = []
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                self._start()
                return
            except BaseException as error:
                self.close()
                if not isinstance(error, AssertionError) or not attempts_left:
                    raise

    def _start(self) -> None:
        # Without the server for submitting by HTTP, whose port is fixed.
        options = "-Dspark.master.rest.enabled=false -Dspark.worker.timeout=600"
        master = self._add(
            "master",
            "org.apache.spark.deploy.master.Master",
            *("--host", "127.0.0.1", "--port", "0", "--webui-port", "0"),
            env={"SPARK_MASTER_OPTS": options},
        )
        self.url = master.until(_MASTER)[1]
        self.workers = [self.add_worker(f"worker-{index}", 2) for index in range(2)]
        for worker in self.workers:
            worker.until(_REGISTERED)

    def add_worker(self, name: str, cores: int) -> Daemon:
        """One more worker; it has its executors' folders below its own."""
        return self._add(
            name,
            "org.apache.spark.deploy.worker.Worker",
            *("--host", "127.0.0.1", "--webui-port", "0", "--cores", str(cores)),
            *("--memory", "2g", "--work-dir", str(self.folder / name), self.url),
            env={"HOROVOD_HOSTNAME": name},
        )

    def remove(self, worker: Daemon) -> None:
        worker.stop()
        self._daemons.remove(worker)

    def _add(self, name: str, *arguments: str, env: Mapping[str, str]) -> Daemon:
        import pyspark

        spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        settings = {"SPARK_DAEMON_MEMORY": "512m", "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA}
        env = {**spark_environment(), **settings, **env}
        self._daemons.append(Daemon(self.folder, name, spark_class, *arguments, env=env))
        return self._daemons[-1]

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.stop()
        self._daemons.clear()
