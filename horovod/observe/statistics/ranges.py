"""Show collective operations to profilers, and in the log.

A channel puts every batch that it runs into a range: of torch.profiler (``record_function``) where
one records this thread, and of NVTX where a tool such as Nsight listens. Ranges are named as
upstream names its NVTX ranges, followed by the tensor's name and the bytes: "HorovodAllreduce:
loss, 4 bytes". A thread that waits for another one to run an operation has a range "HorovodWait".
With HOROVOD_LOG_LEVEL=debug every operation is a line in the log. While nobody looks all of this
costs nothing but the question whether somebody does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from horovod.common.config import Config
from horovod.common.logging import get_logger
from horovod.observe.statistics.operations import Operation, size_of

logger = get_logger(__name__)

profiler_records = _profiler_enabled  # in this thread, now

_INJECTED = "NVTX_INJECTION64_PATH"  # set by tools that take NVTX ranges

_GROUPED = ("allreduce", "allgather", "reducescatter")


class Ranges:
    """Shows the operations of a channel to profilers and to the log, if anybody looks."""

    def __init__(self, config: Config) -> None:
        listens = _INJECTED in os.environ and not config.disable_nvtx_ranges
        self._nvtx = listens and torch.cuda.is_available()
        self._log = logger.isEnabledFor(logging.DEBUG)
        self.always = self._nvtx or self._log  # if not, only while a profiler records

    @contextmanager
    def around(self, requests: Sequence[Operation], nbytes: int, transport: str) -> Iterator[None]:
        """Show operations that run together, with all their bytes, while they run."""
        text = describe(requests, nbytes)
        began = time.perf_counter()
        with record_function(text) if profiler_records() else nullcontext():
            if self._nvtx:
                torch.cuda.nvtx.range_push(text)  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                if self._nvtx:
                    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if self._log:
            took = (time.perf_counter() - began) * 1000
            together = f" together with {len(requests) - 1} others" if len(requests) > 1 else ""
            for request in requests:
                about = request.name, size_of(request), transport, took, together, request.source
                logger.debug("%s: %d bytes through %s in %.3f ms%s (%s)", *about)


def waiting(request: Operation) -> Any:
    """Return a context for a thread that waits until `request` has run."""
    if not profiler_records():
        return nullcontext()
    return record_function(f"HorovodWait: {_label(request)}, {size_of(request)} bytes")


def describe(requests: Sequence[Operation], nbytes: int) -> str:
    """Return the name of the range of requests that run together."""
    first = requests[0]
    grouped = "Grouped" if len(first.tensors) > 1 and first.kind.value in _GROUPED else ""
    kind = "".join(word.capitalize() for word in first.kind.value.split("_"))
    more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
    return f"Horovod{grouped}{kind}: {_label(first)}{more}, {nbytes} bytes"


def _label(request: Operation) -> str:
    return request.name.partition(".")[2] or request.name
