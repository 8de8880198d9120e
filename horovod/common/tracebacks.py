"""Tracebacks that end where the user's own code does.

`init` installs this as the hook for uncaught exceptions; `horovod.runner.functions.run_task` uses
it as well. Our frames say nothing to most readers, so consecutive frames of ours become one line.
If the error is not one of Horovod's own, the last of our frames stays, since it may be our mistake.
HOROVOD_LOG_LEVEL=debug (or trace) shows all of them.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from types import TracebackType

from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.logging import get_logger

_PACKAGE = str(Path(__file__).resolve().parent.parent)


def install_hook() -> None:
    """Show uncaught exceptions with our frames folded, unless the program has its own hook."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, as Python would print it, with our frames folded."""
    summary = traceback.TracebackException.from_exception(error)
    if not get_logger().isEnabledFor(logging.DEBUG):
        _fold(summary, isinstance(error, (HorovodInternalError, HostsUpdatedInterrupt)))
    return "".join(summary.format()) + _device_hint(str(error))


def _device_hint(message: str) -> str:
    """Explain CUDA's "invalid device ordinal": a line to add to the error, empty for other errors.

    Batch systems may show each process one GPU, which is then device 0 in all of them, while many
    scripts say `torch.cuda.set_device(hvd.local_rank())`.
    """
    torch = sys.modules.get("torch")
    if torch is None or "invalid device ordinal" not in message:
        return ""
    count = torch.cuda.device_count()
    devices = "one GPU, which is device 0" if count == 1 else f"{count} GPUs"
    return (
        f"This process sees {devices}, whatever its local rank: choose the device with "
        "torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())\n"
    )


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception; this is the hook."""
    try:
        text = format_error(error)
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # a hook that fails must not hide what it was called for
        sys.__excepthook__(kind, error, trace)


def _fold(summary: traceback.TracebackException | None, entirely: bool) -> None:
    """Fold our frames in an error and in those that it was raised from or after."""
    seen: set[int] = set()
    while summary is not None and id(summary) not in seen:
        seen.add(id(summary))
        _fold_stack(summary.stack, entirely)
        summary = summary.__cause__ or summary.__context__


def _fold_stack(stack: traceback.StackSummary, entirely: bool) -> None:
    """Replace consecutive frames of ours by one; keep the very last unless `entirely`."""
    kept: list[traceback.FrameSummary] = []
    run: list[traceback.FrameSummary] = []

    def end_run(keep_last: bool) -> None:
        shown = [run.pop()] if run and keep_last else []
        if len(run) == 1:
            kept.extend(run)  # a line that stands for one frame would be no shorter
        elif run:
            last = run[-1]
            text = f"({len(run)} calls inside horovod; HOROVOD_LOG_LEVEL=debug shows them)"
            kept.append(traceback.FrameSummary(last.filename, last.lineno, last.name, line=text))
        kept.extend(shown)
        run.clear()

    for frame in stack:
        if frame.filename.startswith(_PACKAGE):
            run.append(frame)
        else:
            end_run(keep_last=False)
            kept.append(frame)
    end_run(keep_last=not entirely)
    stack[:] = kept
