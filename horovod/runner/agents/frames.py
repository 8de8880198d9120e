"""The format of the stream from an agent to the launcher.

`agent_streams` writes it on a host, `host_agent` reads it in the launcher. The stream begins with
`MARK`, because a login shell may have written something before the agent started. Frames follow:
u32 length of the content, u8 kind, content, and a newline, because Slurm's srun passes on whole
lines only. The kinds `STDOUT` and `STDERR` carry output of a worker: its u32 id, then bytes, of
which there are none at the end of the stream. `EVENT` carries an event of the agent in JSON.
"""

from __future__ import annotations

import struct

MARK = b"\nhorovod-agent-1\n"
EVENT, STDOUT, STDERR = 0, 1, 2
STREAMS = {STDOUT: "stdout", STDERR: "stderr"}

_FRAME = struct.Struct("!IB")
_WORKER = struct.Struct("!I")
_END = b"\n"


def event_frame(content: bytes) -> bytes:
    """Return the frame of an event in JSON."""
    return _FRAME.pack(len(content), EVENT) + content + _END


def output_frame(kind: int, worker: int, data: bytes) -> bytes:
    """Return the frame of a worker's output; ``kind`` is `STDOUT` or `STDERR`."""
    return _FRAME.pack(_WORKER.size + len(data), kind) + _WORKER.pack(worker) + data + _END


class FrameReader:
    """Cuts the stream into frames. `before` has the last bytes that came ahead of the mark."""

    def __init__(self) -> None:
        self._input = bytearray()
        self._begun = False
        self.before = b""

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Return the frames that ``data`` completes: kind, worker (0 for an event) and content."""
        self._input += data
        if not self._begun and not self._find_mark():
            return []
        frames = []
        start = 0
        while len(self._input) - start >= _FRAME.size:
            length, kind = _FRAME.unpack_from(self._input, start)
            content = start + _FRAME.size
            end = content + length
            if len(self._input) < end + len(_END):
                break
            worker = 0
            start = end + len(_END)
            if kind != EVENT:
                (worker,) = _WORKER.unpack_from(self._input, content)
                content += _WORKER.size
            frames.append((kind, worker, bytes(self._input[content:end])))
        del self._input[:start]
        return frames

    def _find_mark(self) -> bool:
        at = self._input.find(MARK)
        kept = at if at >= 0 else max(0, len(self._input) - len(MARK))
        self.before = (self.before + bytes(self._input[:kept]))[-4000:]
        del self._input[: at + len(MARK) if at >= 0 else kept]
        self._begun = at >= 0
        return self._begun
