"""A real HDFS on this machine: one NameNode and one DataNode, as processes of their own.

    python -m tests.spark.hdfs "$(hadoop classpath --glob)"

prints the URL of a folder in it, for HOROVOD_TEST_STORES of `test_remote_stores`, and serves until
it is interrupted. Hadoop 2.7 and newer; CONTRIBUTING.md says where to get one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.spark.cluster import QUICK_JAVA, Daemon

_LISTENS = re.compile(r"NameNode RPC up at: \S*:(\d+)")
_ADDRESSES = {  # the NameNode's own port is chosen when it starts
    "dfs.namenode.http-address": "127.0.0.1:0",
    "dfs.datanode.address": "127.0.0.1:0",
    "dfs.datanode.http.address": "127.0.0.1:0",
    "dfs.datanode.ipc.address": "127.0.0.1:0",
    "dfs.datanode.hostname": "127.0.0.1",
}
# For a Hadoop that is older than the modules of Java.
_PACKAGES = ("lang", "lang.reflect", "util", "util.concurrent", "nio", "net", "io")


class Hdfs:
    """Serves `url` from when it is made until `close`."""

    def __init__(self, folder: Path, classpath: str) -> None:
        self._folder = folder
        self._classpath = classpath
        self._daemons: list[Daemon] = []
        for page in ("hdfs", "datanode"):  # which their servers do not start without
            (folder / "webapps" / page / "WEB-INF").mkdir(parents=True)
            (folder / "webapps" / page / "WEB-INF" / "web.xml").write_text("<web-app></web-app>")
        (folder / "log4j.properties").write_text(
            "log4j.rootLogger=INFO,console\n"
            "log4j.appender.console=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.console.layout=org.apache.log4j.SimpleLayout\n"
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._configure(0)
        namenode = "org.apache.hadoop.hdfs.server.namenode.NameNode"
        subprocess.run(
            [*self._java(namenode), "-format", "-nonInteractive"],
            check=True,
            capture_output=True,
            timeout=300,
        )
        port = int(self._run("namenode", namenode).until(_LISTENS)[1])
        self._configure(port)
        datanode = "org.apache.hadoop.hdfs.server.datanode.DataNode"
        self._run("datanode", datanode).until("Got finalize command|Successfully sent block report")
        self.url = f"hdfs://127.0.0.1:{port}"

    def _configure(self, port: int) -> None:
        server = f"127.0.0.1:{port}"
        settings = {
            "fs.defaultFS": f"hdfs://{server}",
            "dfs.namenode.rpc-address": server,
            "dfs.replication": "1",
            "dfs.namenode.name.dir": (self._folder / "name").as_uri(),
            "dfs.datanode.data.dir": (self._folder / "data").as_uri(),
            "hadoop.tmp.dir": str(self._folder / "tmp"),
            **_ADDRESSES,
        }
        properties = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>\n"
            for name, value in settings.items()
        )
        for name in ("core-site.xml", "hdfs-site.xml"):
            (self._folder / name).write_text(f"<configuration>\n{properties}</configuration>\n")

    def _java(self, name: str) -> list[str]:
        opens = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _PACKAGES]
        path = f"{self._folder}{os.pathsep}{self._classpath}"
        options = ["-Xmx512m", "-Djava.security.manager=allow", *QUICK_JAVA.split()]
        return ["java", *options, *opens, "-cp", path, name]

    def _run(self, kind: str, name: str) -> Daemon:
        self._daemons.append(Daemon(self._folder, kind, *self._java(name), env=os.environ))
        return self._daemons[-1]

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.stop()
        self._daemons.clear()


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        hdfs = Hdfs(Path(folder), sys.argv[1])
        try:
            ends = {signal.SIGINT, signal.SIGTERM}
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            print(f"{hdfs.url}/tests", flush=True)
            signal.sigwait(ends)
        finally:
            hdfs.close()


if __name__ == "__main__":
    main()
