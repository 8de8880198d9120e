"""A switch between hosts that holds every packet for some time, for kernels without netem.

Used by `benchmarks.network_hosts`, for links between cities. A thread passes on what the hosts'
ports receive, in the pieces of up to 64 KiB into which the kernel has cut it: at the rates of such
links it takes little of a core.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

VIRTIO_HEADER = (
    10  # bytes, before each packet: how the kernel is to cut it, and where its checksum is
)
ADDRESS = 6  # bytes, of an interface
LARGEST = 1 << 17  # bytes of one packet, at most
SECOND_MS = 1000


class DelayedSwitch:
    """Passes packets on among ports, each `delay` seconds after it has come.

    Args:
        ports: Packet sockets that begin each packet with its virtio header, one for each host.
    """

    def __init__(self, ports: Sequence[socket.socket]) -> None:
        self.delay = 0.0
        self._ports = ports
        self._known: dict[bytes, socket.socket] = {}  # by the address of the interface behind it
        self._held: deque[tuple[float, socket.socket, bytes]] = deque()  # due, source, packet
        self._is_closed = False
        self._thread = threading.Thread(target=self._pass_on, name="switch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lose what is held, and close the ports."""
        self._is_closed = True
        self._thread.join()
        for port in self._ports:
            port.close()

    def _pass_on(self) -> None:
        poll = select.poll()
        by_number = {port.fileno(): port for port in self._ports}
        for port in self._ports:
            poll.register(port, select.POLLIN)
        while not self._is_closed:
            wait = SECOND_MS / 10
            if self._held:
                wait = max(0.0, SECOND_MS * (self._held[0][0] - time.monotonic()))
            for number, _ in poll.poll(wait):
                self._take(by_number[number])
            while self._held and self._held[0][0] <= time.monotonic():
                _, source, packet = self._held.popleft()
                self._send(source, packet)

    def _take(self, port: socket.socket) -> None:
        """Hold a packet that has come from a host; what we have sent ourselves is seen, too."""
        packet, address = port.recvfrom(LARGEST)
        if address[2] != socket.PACKET_OUTGOING:
            self._known[packet[VIRTIO_HEADER + ADDRESS : VIRTIO_HEADER + 2 * ADDRESS]] = port
            self._held.append((time.monotonic() + self.delay, port, packet))

    def _send(self, source: socket.socket, packet: bytes) -> None:
        """Send a packet to the host that it is for, or to all others."""
        target = self._known.get(packet[VIRTIO_HEADER : VIRTIO_HEADER + ADDRESS])
        for port in self._ports if target is None else [target]:
            if port is not source:
                port.send(packet)
