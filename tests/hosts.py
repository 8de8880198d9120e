"""Several hosts on one machine, for tests of what crosses hosts. Used by tests/multihost.

`Hosts(n)` gives every host a network stack of its own, joined by a bridge, and a name of its own;
ranks started with `Hosts.run` or `Hosts.start` see their host's network, host name and hosts file,
and nothing but that network connects them. File system, process ids and memory are shared, as they
are not between real hosts.

The network name spaces have no names: a descriptor of the test process holds each, so runs cannot
collide, and the kernel takes everything down when the process ends, however it ends. They need
root and `ip` (Debian: iproute2); `available` says what is missing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from horovod.common.store import StoreServer
from horovod.common.topology import Slot
from horovod.common.wire import new_key
from horovod.runner.slots.worker_env import WorkerRendezvous, common_variables, slot_variables
from tests.missing import HOSTS
from tests.rank_process import Rank
from tests.ranks import PATIENCE, Ranks, clean_environment

T = TypeVar("T")

NETWORK = "198.51.100"  # reserved for documentation; here it exists inside the name spaces only
LAUNCHER = f"{NETWORK}.254"  # where the launcher's store is, on a machine that runs no rank
INTERFACE = "eth0"  # a host's, beside loopback
USER_PORT = 29500  # for a process group that a script opens by itself

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_ETH_P_ALL, _SOL_PACKET, _PACKET_VNET_HDR = 3, 263, 15
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_PORT_BUFFER = 32 << 20  # bytes


@functools.cache
def available() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return f"{HOSTS} root"
    if _program("ip") is None:
        return f"{HOSTS} the program ip (iproute2)"
    try:
        with Hosts(1) as hosts:
            return None if hosts.reach(0, timeout=60) else "the hosts' network does not work"
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        return f"this machine lends no network name spaces: {error} {said}".strip()


def host_name(host: int) -> str:
    return f"host{host}"


def host_address(host: int) -> str:
    return f"{NETWORK}.{host + 1}"


class Hosts:
    """`count` hosts, numbered from 0. Leaving the `with` block takes them down.

    Each has one network interface beside loopback, named eth0 unless `interfaces` says otherwise.
    """

    def __init__(self, count: int, interfaces: Sequence[str] = ()) -> None:
        self.count = count
        self.interfaces = list(interfaces) or [INTERFACE] * count
        self._spaces: list[_NetworkSpace] = []
        try:
            self._switch = self._new_space()
            self._switch.ip("link add br0 type bridge", f"addr add {LAUNCHER}/24 dev br0")
            self._switch.ip("link set lo up", "link set br0 up")
            self._hosts = [self._new_host(host) for host in range(count)]
        except BaseException:
            self.close()
            raise

    def _new_space(self) -> _NetworkSpace:
        self._spaces.append(_NetworkSpace())
        return self._spaces[-1]

    def _new_host(self, host: int) -> _NetworkSpace:
        space = self._new_space()
        interface = self.interfaces[host]
        self._switch.ip(
            f"link add port{host} type veth peer name {interface} netns {space.path}",
            f"link set port{host} master br0 up",
        )
        space.ip(
            f"addr add {host_address(host)}/24 dev {interface}",
            "link set lo up",
            f"link set {interface} up",
        )
        return space

    def ip(self, host: int, *commands: str) -> None:
        """Run commands of `ip` on the host."""
        self._hosts[host].ip(*commands)

    def limit(self, host: int, rate: str | None) -> None:
        """Let the host send no faster than `rate`, such as 1gbit; None: as fast as it can."""
        how = "noqueue" if rate is None else f"tbf rate {rate} burst 512kb latency 100ms"
        self._hosts[host].tc(f"qdisc replace dev {self.interfaces[host]} root {how}")

    def unplug(self, host: int) -> socket.socket:
        """Take the host off the bridge, and return a socket for all its packets, to a switch.

        Each packet begins with its virtio header, so that the kernel need not cut it.
        """
        port = f"port{host}"

        def opened() -> socket.socket:
            packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
            packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
                packets.setsockopt(socket.SOL_SOCKET, option, _PORT_BUFFER)
            packets.bind((port, _ETH_P_ALL))
            return packets

        self._switch.ip(f"link set {port} nomaster")
        return self._switch.do(opened)

    def popen(self, host: int, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start a program on the host."""
        entrance = self.entrance(host)
        return subprocess.Popen(command, preexec_fn=lambda: enter(*entrance), **how)

    def cut(self, host: int) -> None:
        """Lose every packet to and from the host; neither side is told."""
        self._switch.ip(f"link set port{host} down")

    def heal(self, host: int) -> None:
        """Undo `cut`; returns once packets get through again."""
        self._switch.ip(f"link set port{host} up")
        deadline = time.monotonic() + PATIENCE
        # The kernel may remember for a while that a host could not be found.
        while not self.reach(host):
            if time.monotonic() > deadline:
                raise OSError(f"host {host} is still cut off")

    def reach(self, host: int, timeout: float = 5) -> bool:
        """Whether the host can open a connection to the launcher's machine."""

        def connect() -> bool:
            try:
                socket.create_connection(server.getsockname(), timeout=timeout).close()
            except OSError:
                return False
            return True

        server = self._switch.do(lambda: socket.create_server((LAUNCHER, 0)))
        with server:
            return self._hosts[host].do(connect)

    def start(
        self,
        function: Callable[..., Any],
        ranks_per_host: Sequence[int],
        *args: Any,
        env: Mapping[str, str] | None = None,
        launcher: Callable[[Slot], Mapping[str, str]] | None = None,
        in_turn: bool = False,
    ) -> Ranks:
        """Start function(rank, size, *args) on every rank; use the result in a `with` block.

        Ranks are numbered host by host, or `in_turn` over the hosts. They get the variables that
        horovodrun would give them, or those of another `launcher`.
        """
        slots = plan(ranks_per_host, in_turn)
        return _RanksOnHosts(self, function, slots, args, env or {}, launcher)

    def run(
        self,
        function: Callable[..., Any],
        ranks_per_host: Sequence[int],
        *args: Any,
        env: Mapping[str, str] | None = None,
        launcher: Callable[[Slot], Mapping[str, str]] | None = None,
        in_turn: bool = False,
        timeout: float = PATIENCE,
    ) -> list[Any]:
        """What function(rank, size, *args) returned on every rank; AssertionError if one failed."""
        with self.start(
            function, ranks_per_host, *args, env=env, launcher=launcher, in_turn=in_turn
        ) as ranks:
            return ranks.results(timeout)

    def serve_store(self, key: bytes) -> StoreServer:
        """The launcher's store, on a machine that all hosts reach."""
        return self._switch.do(lambda: StoreServer(LAUNCHER, key))

    def entrance(self, host: int) -> tuple[str, str, str]:
        """What a process needs in order to `enter` the host."""
        names = [(host_address(each), host_name(each)) for each in range(self.count)]
        lines = [("127.0.0.1", "localhost"), (LAUNCHER, "launcher"), *names]
        hosts_file = "".join(f"{address} {name}\n" for address, name in lines)
        return self._hosts[host].path, host_name(host), hosts_file

    def close(self) -> None:
        for space in self._spaces:
            space.close()
        self._spaces.clear()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plan(ranks_per_host: Sequence[int], in_turn: bool = False) -> list[Slot]:
    """The place of every rank: host by host, or in turn over the hosts that have room."""
    placed = [(host, local) for host, count in enumerate(ranks_per_host) for local in range(count)]
    if in_turn:
        placed.sort(key=lambda place: place[1])
    slots = []
    for rank, (host, local) in enumerate(placed):
        peers = [h for h, count in enumerate(ranks_per_host) if count > local]
        slots.append(
            Slot(
                hostname=host_name(host),
                rank=rank,
                size=len(placed),
                local_rank=local,
                local_size=ranks_per_host[host],
                cross_rank=peers.index(host),
                cross_size=len(peers),
            )
        )
    return slots


def host_of(slot: Slot) -> int:
    return int(slot.hostname.removeprefix("host"))


class _RanksOnHosts(Ranks):
    """Ranks in the hosts of their slots."""

    def __init__(
        self,
        hosts: Hosts,
        function: Callable[..., Any],
        slots: Sequence[Slot],
        arguments: Sequence[Any],
        env: Mapping[str, str],
        launcher: Callable[[Slot], Mapping[str, str]] | None,
    ) -> None:
        key = new_key()
        self.size = len(slots)
        self._server = hosts.serve_store(key)
        self._ranks: list[Rank] = []
        meeting = WorkerRendezvous(LAUNCHER, self._server.port, key, LAUNCHER, USER_PORT)
        try:
            for slot in slots:
                if launcher is None:
                    place = common_variables(meeting) | slot_variables(slot)
                else:
                    place = dict(launcher(slot))
                environ = clean_environment() | {"OMP_NUM_THREADS": "1"} | place | env
                entrance = hosts.entrance(host_of(slot))
                inside = (entrance, function, (slot.rank, self.size, *arguments))
                self._ranks.append(Rank(slot.rank, environ, _run_inside, inside))
        except BaseException:
            self.close()
            raise


# -- in the rank ---------------------------------------------------------------------------------


def _run_inside(
    entrance: tuple[str, str, str], function: Callable[..., Any], arguments: Sequence[Any]
) -> Any:
    enter(*entrance)
    return function(*arguments)


def enter(network: str, name: str, hosts_file: str) -> None:
    """Move this process, which must not have opened a socket or a thread yet, into a host."""
    descriptor = os.open(network, os.O_RDONLY)
    _system("setns", descriptor, _CLONE_NEWNET)
    os.close(descriptor)
    _system("unshare", _CLONE_NEWUTS | _CLONE_NEWNS)
    socket.sethostname(name)
    # The file lives in memory that no path leads to: it is gone with the process.
    _system("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _system("mount", b"tmpfs", b"/mnt", b"tmpfs", 0, None)
    with open("/mnt/hosts", "w") as file:
        file.write(hosts_file)
    _system("mount", b"/mnt/hosts", b"/etc/hosts", None, _MS_BIND, None)
    _system("umount2", b"/mnt", _MNT_DETACH)


# -- name spaces ---------------------------------------------------------------------------------


class _NetworkSpace:
    """A network stack: interfaces, addresses, ports and abstract sockets."""

    def __init__(self) -> None:
        self._descriptor = _in_new_thread(_open_new_space)

    @property
    def path(self) -> str:
        """Opened by other processes to enter it, also by `nsenter --net=` of a person."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def do(self, function: Callable[[], T]) -> T:
        """Call `function` inside. Sockets that it makes stay inside."""

        def inside() -> T:
            _system("setns", self._descriptor, _CLONE_NEWNET)
            return function()

        return _in_new_thread(inside)

    def ip(self, *commands: str) -> None:
        self._batch("ip", *commands)

    def tc(self, *commands: str) -> None:
        self._batch("tc", *commands)

    def _batch(self, name: str, *commands: str) -> None:
        program = _program(name)
        if program is None:
            raise FileNotFoundError(f"there is no program {name} (iproute2)")
        self.do(
            lambda: subprocess.run(
                [program, "-batch", "-"],
                input="\n".join(commands),
                check=True,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        )

    def close(self) -> None:
        os.close(self._descriptor)


def _open_new_space() -> int:
    _system("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _in_new_thread(function: Callable[[], T]) -> T:
    """Name spaces belong to threads: the calling one stays where it is."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _system(function: str, *args: Any) -> None:
    if getattr(_LIBC, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
