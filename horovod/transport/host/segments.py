"""Handing memory, doorbells and process handles between the ranks of one host.

Every rank creates an anonymous memory file and an eventfd, opens a pidfd of itself, and passes
the three descriptors to rank 0 of the group, which passes all descriptors to all ranks. They travel
over an abstract Unix socket: it has no name in the file system, so nothing is left after a crash,
no other user can open anything, and the size of /dev/shm does not matter. Both ends check that the
other one is of the same user, and rank 0 checks the token that it has put into the job's store.

If any rank cannot take part (another host, another namespace, a system without memfd), all ranks
raise `SharedMemoryUnavailable` with the reason. Called by the shared-memory transport.
"""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from horovod.common.host import check_same_user
from horovod.transport.base import Group

_DESCRIPTORS = 3  # for each rank: memory, doorbell, process
_PER_MESSAGE = 80  # ranks in one message: the kernel takes at most 253 descriptors
_ANNOUNCE_LIMIT = 4096
_OTHERS_FAILED = b"other ranks failed"


class SharedMemoryUnavailable(Exception):
    """The ranks of this group cannot share memory. All ranks raise it, with the same reason."""


class _OthersFailed(Exception):
    """This rank works, but another rank has given up."""


@dataclass(frozen=True)
class Member:
    """One rank's memory, doorbell (eventfd), process handle (pidfd) and pid, as this rank has them.

    The memory stays mapped until nothing refers to it any more.
    """

    memory: mmap.mmap
    doorbell: int
    process: int
    pid: int

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.doorbell)
        os.close(self.process)


def share(group: Group, nbytes: int, timeout: float) -> list[Member]:
    """Create this rank's segment of memory and return all ranks' segments. Collective.

    Args:
        group: The ranks.
        nbytes: The size of a segment.
        timeout: Seconds within which all ranks must have come.

    Returns:
        The members in rank order.

    Raises:
        SharedMemoryUnavailable: Some rank cannot take part.
    """
    verdict, members = b"", None
    try:
        members = _exchange(group, nbytes, timeout)
    except _OthersFailed:
        verdict = _OTHERS_FAILED
    except (OSError, TimeoutError, AttributeError, ValueError) as error:
        verdict = f"{group.describe(group.rank)}: {error or type(error).__name__}".encode()
    group.store.set(f"shm/verdict/{group.rank}", verdict)
    verdicts = [group.store.get(f"shm/verdict/{rank}", timeout) for rank in range(group.size)]
    complaints = sorted(filter(None, verdicts), key=_OTHERS_FAILED.__eq__)  # real reasons first
    if complaints or members is None:
        for member in members or ():
            member.close()
        raise SharedMemoryUnavailable(complaints[0].decode())
    return members


def _exchange(group: Group, nbytes: int, timeout: float) -> list[Member]:
    """Open our descriptors, exchange them with the other ranks, and map all memory."""
    if sys.platform != "linux":
        raise OSError(f"shared memory needs Linux, this is {sys.platform}")
    with contextlib.ExitStack() as stack:
        memory = _open(stack, os.memfd_create, "horovod", os.MFD_CLOEXEC)
        os.ftruncate(memory, nbytes)
        doorbell = _open(stack, os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        process = _open(stack, os.pidfd_open, os.getpid())
        mine = (memory, doorbell, process)
        if group.rank == 0:
            everyone, pids = _exchange_as_host(group, mine, timeout, stack)
        else:
            everyone, pids = _exchange_as_guest(group, mine, timeout, stack)
        members = []
        for (memory, doorbell, process), pid in zip(everyone, pids, strict=True):
            size = os.fstat(memory).st_size
            if size != nbytes:
                raise ValueError(f"a segment of {size} bytes arrived where {nbytes} were due")
            members.append(
                Member(mmap.mmap(memory, nbytes), os.dup(doorbell), os.dup(process), pid)
            )
        return members


def _open(stack: contextlib.ExitStack, call: Callable[..., int], *arguments: object) -> int:
    """Return a new descriptor that `stack` closes. A sandbox may refuse: the error names `call`."""
    try:
        descriptor = call(*arguments)
    except OSError as error:
        raise OSError(f"{call.__name__}: {error}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _exchange_as_host(
    group: Group, mine: tuple[int, ...], timeout: float, stack: contextlib.ExitStack
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Collect the descriptors of all ranks as rank 0, then send all of them to every rank."""
    name, token = f"\0horovod-{secrets.token_hex(16)}", secrets.token_hex(16)
    everyone: list[tuple[int, ...]] = [mine] + [()] * (group.size - 1)
    pids = [os.getpid()] + [0] * (group.size - 1)
    guests: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(timeout)
        listener.bind(name)
        listener.listen(group.size)
        invitation = {"name": name[1:], "token": token, "pid": os.getpid()}
        group.store.set("shm/host", json.dumps(invitation).encode())
        while len(guests) < group.size - 1:
            if any(group.store.try_get(f"shm/verdict/{r}") for r in range(1, group.size)):
                raise _OthersFailed
            listener.settimeout(min(timeout, 0.5))
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                group.check_rendezvous()
                timeout -= 0.5
                if timeout <= 0:
                    missing = [r for r in range(1, group.size) if r not in guests]
                    raise TimeoutError(f"ranks {missing} did not come") from None
                continue
            stack.callback(guest.close)
            guest.settimeout(max(timeout, 0.5))
            pid = check_same_user(guest)
            text, fds = _receive(guest, _DESCRIPTORS, stack)
            announcement = json.loads(text)
            if not secrets.compare_digest(str(announcement["token"]), token):
                continue
            rank = int(announcement["rank"])
            everyone[rank], pids[rank], guests[rank] = tuple(fds), pid, guest
    for guest in guests.values():
        for start in range(0, group.size, _PER_MESSAGE):
            part = everyone[start : start + _PER_MESSAGE]
            text = json.dumps(pids[start : start + _PER_MESSAGE]).encode()
            socket.send_fds(guest, [text], [fd for fds in part for fd in fds])
    return everyone, pids


def _exchange_as_guest(
    group: Group, mine: tuple[int, ...], timeout: float, stack: contextlib.ExitStack
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Send our descriptors to rank 0, and receive those of all ranks."""
    invitation = json.loads(group.store.get("shm/host", timeout))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
        host.settimeout(timeout)
        host.connect("\0" + invitation["name"])
        check_same_user(host)
        announcement = {"rank": group.rank, "token": invitation["token"]}
        socket.send_fds(host, [json.dumps(announcement).encode()], list(mine))
        everyone: list[tuple[int, ...]] = []
        pids: list[int] = []
        while len(everyone) < group.size:
            part = min(_PER_MESSAGE, group.size - len(everyone))
            text, fds = _receive(host, part * _DESCRIPTORS, stack)
            pids += json.loads(text)
            everyone += [tuple(fds[i : i + 3]) for i in range(0, len(fds), _DESCRIPTORS)]
    return everyone, pids


def _receive(
    channel: socket.socket, count: int, stack: contextlib.ExitStack
) -> tuple[bytes, list[int]]:
    """Receive a message with `count` descriptors, which `stack` closes."""
    space = socket.CMSG_SPACE(count * array.array("i").itemsize)
    text, ancillary, _, _ = channel.recvmsg(_ANNOUNCE_LIMIT, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        stack.callback(os.close, fd)
    if not text or len(fds) != count:
        raise OSError(f"{len(fds)} of {count} descriptors arrived")
    return text, list(fds)
