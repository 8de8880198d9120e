"""One rank of benchmarks/scaling_model.py: measures what it is told to, and answers.

Started by `benchmarks.scaling_measure` like a rank of torchrun. An order is a JSON list, the name
of a function of `Orders` and its arguments; all ranks get the same one.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # `import tensorflow` must not find ours

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.processes import Member  # noqa: E402
from benchmarks.training_models import WORKLOADS  # noqa: E402
from benchmarks.training_rank import RANK, batches, make  # noqa: E402

CHUNK = 1 << 20
CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds for which a peer may be silent
TRIES = 5  # of what may be disturbed by other programs: the fastest counts


class Orders:
    """What a rank can be told to do."""

    def __init__(self, init_seconds: float) -> None:
        self.init_seconds = init_seconds
        self._listener: socket.socket | None = None

    def init(self) -> float:
        return self.init_seconds

    # -- raw sockets, between the first two ranks ----------------------------------------------

    def listen(self) -> int:
        """The port on which this rank awaits another."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def _peer(self, port: int) -> socket.socket:
        if RANK == 0:
            assert self._listener is not None
            peer, _ = self._listener.accept()
            self._listener.close()
        else:
            peer = socket.create_connection(("127.0.0.1", port))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(PATIENCE)  # a transport that notices lost peers waits in poll(), too
        return peer

    def ping_pong(self, port: int, count: int) -> list[float]:
        """Seconds, by the clock and of CPU, for a message there and one back."""
        message = bytearray(4)
        with self._peer(port) as peer:

            def trips() -> None:
                for _ in range(count):
                    if RANK == 0:
                        peer.sendall(message)
                    _fill(peer, memoryview(message))
                    if RANK != 0:
                        peer.sendall(message)

            wall, cpu = _quietest(trips)
        return [wall / count, cpu / count]

    def stream(self, port: int, nbytes: int) -> list[float]:
        """Seconds, by the clock and of CPU, for each byte that rank 0 sends and rank 1 receives."""
        chunk = memoryview(bytearray(CHUNK))
        with self._peer(port) as peer:

            def flow() -> None:
                for _ in range(nbytes // CHUNK):
                    if RANK == 0:
                        peer.sendall(chunk)
                    else:
                        _fill(peer, chunk)

            wall, cpu = _quietest(flow)
        return [wall / nbytes, cpu / nbytes]

    # -- alone ---------------------------------------------------------------------------------

    def memory(self, nbytes: int) -> list[float]:
        """Seconds for each byte that is added to others, and that is copied."""
        target, source = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
        added = _fastest(lambda: np.add(target, source, out=target))
        return [added / nbytes, _fastest(lambda: np.copyto(target, source)) / nbytes]

    def store(self, count: int, nbytes: int) -> list[float]:
        """Seconds of a request to a store, and for each byte that it serves."""
        from horovod.common.store import StoreClient, StoreServer
        from horovod.common.wire import new_key

        key = new_key()
        server = StoreServer("127.0.0.1", key)
        try:
            client = StoreClient("127.0.0.1", server.port, key, PATIENCE)
            client.set("small", b"1")
            client.set("large", bytes(nbytes))
            small = _fastest(lambda: client.get("small", PATIENCE), count)
            large = _fastest(lambda: client.get("large", PATIENCE), max(1, count // 20))
            client.close()
        finally:
            server.close()
        return [small, max(0.0, large - small) / nbytes]

    # -- together ------------------------------------------------------------------------------

    def allreduce(self, nbytes: int, count: int) -> list[float]:
        """Seconds of each of `count` calls."""
        import horovod.torch as hvd

        tensors = [torch.zeros(nbytes // 4).fill_(0) for _ in range(2)]
        elapsed = []
        for number in range(count):
            begin = time.perf_counter()
            hvd.allreduce_(tensors[number % 2], op=hvd.Sum, name="scaling")
            elapsed.append(time.perf_counter() - begin)
        return elapsed

    def allreduce_work(self, nbytes: int, count: int) -> float:
        """Seconds of CPU of a call: they say little of other programs on the machine."""
        _, cpu = _quietest(lambda: self.allreduce(nbytes, count))
        return cpu / count

    def train(self, model: str, steps: int) -> dict[str, Any]:
        """Seconds of steps without and with communication, in turns; and the tensors' bytes."""
        workload = WORKLOADS[model]
        data = batches(workload, CPU)
        trainees = {name: make(name, workload, CPU, 0.9).step for name in ("plain", "ours")}
        elapsed: dict[str, list[float]] = {name: [] for name in trainees}
        gc.collect()
        for number in range(steps):
            for name, step in trainees.items():
                begin = time.perf_counter()
                step(data[number % len(data)])
                elapsed[name].append(time.perf_counter() - begin)
        sizes = [parameter.nbytes for parameter in workload.model().parameters()]
        return {**elapsed, "sizes": sizes}


def _fill(peer: socket.socket, view: memoryview) -> None:
    while view:
        received = peer.recv_into(view)
        if not received:
            raise ConnectionError("the other rank has gone")
        view = view[received:]


def _quietest(call: Any) -> tuple[float, float]:
    """Seconds by the clock and of CPU, when it took the fewest."""
    found = []
    for _ in range(TRIES):
        begin, used = time.perf_counter(), time.process_time()
        call()
        found.append((time.perf_counter() - begin, time.process_time() - used))
    return min(found)


def _mean(call: Any, count: int) -> float:
    call()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def _fastest(call: Any, count: int = 1) -> float:
    return min(_mean(call, count) for _ in range(TRIES))


def main() -> None:
    member = Member()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    import horovod.torch as hvd

    begin = time.perf_counter()
    hvd.init()
    orders = Orders(time.perf_counter() - begin)
    member.obey(lambda order: getattr(orders, order[0])(*order[1:]))
    hvd.shutdown()


if __name__ == "__main__":
    main()
