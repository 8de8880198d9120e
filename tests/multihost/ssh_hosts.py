"""Hosts that can be logged in to, one sshd on each, with throwaway keys: for tests and benchmarks.

Needs what `tests.hosts` needs, and the programs of OpenSSH (Debian: openssh-server and
openssh-client). The client's configuration is put in place of the system's own, seen by the
processes of these hosts only.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.hosts import Hosts, host_address, host_name
from tests.hosts import available as hosts_available
from tests.missing import SSH
from tests.ranks import clean_environment
from tests.runner.horovodrun import command

ROOT = Path(__file__).resolve().parents[2]
INTERFACES = ["eth0", "ens7", "lan0"]  # one for each host: they need not be alike
_PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@functools.cache
def available() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    for program in ("ssh", "ssh-keygen", "sshd"):
        if shutil.which(program, path=_PLACES) is None:
            return f"{SSH} {program} (OpenSSH)"
    return hosts_available()


class SshHosts:
    """Three hosts; horovodrun runs on the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = Hosts(len(INTERFACES), INTERFACES)
        self._servers: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        try:
            for name in ("host_key", "id_good", "id_bad"):
                _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
            self._configure()
            for host in range(self.hosts.count):
                self._serve(host)
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        folder = self.folder
        (folder / "authorized_keys").write_bytes((folder / "id_good.pub").read_bytes())
        kind, key, *_ = (folder / "host_key.pub").read_text().split()
        names = ",".join(f"{host_name(h)},{host_address(h)}" for h in range(self.hosts.count))
        (folder / "known_hosts").write_text(f"{names} {kind} {key}\n")
        (folder / "ssh_config").write_text(
            f"Host other-name\n  HostName {host_address(1)}\n  HostKeyAlias host1\n"
            f"Host *\n  UserKnownHostsFile {folder}/known_hosts\n"
            f"  IdentityFile {folder}/id_good\n  IdentitiesOnly yes\n"
        )

    def _serve(self, host: int) -> None:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where sshd wants an empty folder
        folder = self.folder
        settings = {
            "ListenAddress": host_address(host),
            "HostKey": f"{folder}/host_key",
            "AuthorizedKeysFile": f"{folder}/authorized_keys",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "UseDNS": "no",
        }
        config = folder / f"sshd_config_{host}"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        program = shutil.which("sshd", path=_PLACES)
        assert program is not None
        server = self.hosts.popen(
            host,
            [program, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._servers.append(server)
        assert server.stderr is not None
        said = server.stderr.readline()
        assert b"listening on" in said, said + server.stderr.read()
        # It says something of every login, and would stand still with a full pipe.
        self._readers.append(threading.Thread(target=server.stderr.read))
        self._readers[-1].start()

    def start(
        self,
        *arguments: str,
        config: str = "",
        env: Mapping[str, str] | None = None,
        output: IO[str] | int = subprocess.PIPE,
        patient: bool = False,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """horovodrun with these arguments on host 0, and perhaps another configuration of ssh.

        `patient`: where it is the cause of a failure that matters.
        """
        inside = ["sh", "-c", 'mount --bind "$0" /etc/ssh/ssh_config && exec "$@"']
        file = self.folder / "ssh_config"
        if config:
            file = self.folder / "other_config"
            file.write_text(config)
        environ = clean_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return self.hosts.popen(
            0,
            [
                *inside,
                str(file),
                *command(*arguments, patient=patient),
            ],
            env=environ | {"HOME": str(self.folder)} | dict(env or {}),
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def run(
        self, *arguments: str, config: str = "", timeout: float = 280, patient: bool = False
    ) -> tuple[int, str, str]:
        """The same to the end: exit code, stdout and stderr."""
        process = self.start(*arguments, config=config, patient=patient)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
            process.wait()
        return process.returncode, stdout.decode(), stderr.decode()

    def mount(self, host: int, *arguments: str) -> None:
        """Mount something that only this host sees, as arguments of ``mount`` say."""
        _run("nsenter", "-t", str(self._servers[host].pid), "-m", "mount", *arguments)

    def unmount(self, host: int, path: Path) -> None:
        """Undo `mount`."""
        _run("nsenter", "-t", str(self._servers[host].pid), "-m", "umount", str(path))

    def close(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()
        for reader in self._readers:
            reader.join()
        self.hosts.close()


def _run(program: str, *arguments: str) -> None:
    subprocess.run([program, *arguments], check=True, capture_output=True, timeout=60)
