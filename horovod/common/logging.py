"""Horovod's log lines.

Every module gets its logger from `get_logger(__name__)`. Lines look like upstream's,
``[2026-01-31 12:00:00.123456: W file.py:12] [3]: text``, where 3 is the rank. HOROVOD_LOG_LEVEL
(trace, debug, info, warning, error, fatal) chooses what is shown and HOROVOD_LOG_HIDE_TIME drops
the time. Levels up to INFO go to stdout, the others to stderr. A program that has configured the
standard logger "horovod" itself keeps its own handlers and level.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Hashable

TRACE = 5
FATAL = logging.CRITICAL
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": FATAL,
}

_ROOT = "horovod"
_rank: int | None = None
_our_level = logging.NOTSET
_lock = threading.Lock()
_logged_keys: set[Hashable] = set()  # the keys that `log_once` has seen

TORCH_VERSION_SAID = "_HOROVOD_TORCH_VERSION_SAID"
"""Set for processes whose driver has warned of its torch, which is theirs as well."""


class _Formatter(logging.Formatter):
    """Makes a line of a record."""

    def format(self, record: logging.LogRecord) -> str:
        letter = next((n[0] for n, v in LEVELS.items() if v >= record.levelno), "f").upper()
        where = f"{letter} {record.filename}:{record.lineno}"
        if not _is_true(os.environ.get("HOROVOD_LOG_HIDE_TIME")):
            seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
            where = f"{seconds}.{int(record.created % 1 * 1e6):06d}: {where}"
        rank = "" if _rank is None else f" [{_rank}]"
        line = f"[{where}]{rank}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _StandardStreams(logging.Handler):
    """Writes to sys.stdout and sys.stderr as they are at the time of the line."""

    def emit(self, record: logging.LogRecord) -> None:
        if any(handler is not self for handler in logging.getLogger(_ROOT).handlers):
            return  # the program has configured its own
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        if stream is None:  # a windowed or closed interpreter
            return
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


def _is_true(text: str | None) -> bool:
    """Return whether the text of a variable means yes."""
    return text is not None and text.strip().lower() not in ("", "0", "false", "no", "off")


def get_logger(name: str = _ROOT) -> logging.Logger:
    """Return the logger of one of our modules; set up the "horovod" logger on first use."""
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        with _lock:
            if not root.handlers:
                _configure(root)
    return root if name == _ROOT else logging.getLogger(name)


def _configure(root: logging.Logger) -> None:
    """Give the "horovod" logger our handler and level."""
    logging.addLevelName(TRACE, "TRACE")
    handler = _StandardStreams()
    handler.setFormatter(_Formatter())
    root.addHandler(handler)
    root.propagate = False
    _read_level()


def _read_level() -> None:
    """Read HOROVOD_LOG_LEVEL, unless the program has set another level itself."""
    global _our_level
    root = logging.getLogger(_ROOT)
    if root.level == _our_level:
        name = os.environ.get("HOROVOD_LOG_LEVEL", "").strip().lower()
        _our_level = LEVELS.get(name, logging.WARNING)
        root.setLevel(_our_level)


def set_rank(rank: int | None) -> None:
    """Show a rank in the lines from now on; None for no rank.

    ``init`` calls this, so HOROVOD_LOG_LEVEL is read again here: programs may set it between
    import and ``init``. A level that the program gave the logger itself stays.
    """
    global _rank
    _rank = rank
    get_logger()
    _read_level()


def log_once(logger: logging.Logger, level: int, key: Hashable, message: str) -> bool:
    """Log a message the first time that its key is used in this process.

    Returns:
        Whether the message was logged.
    """
    with _lock:
        if key in _logged_keys:
            return False
        _logged_keys.add(key)
    logger.log(level, message, stacklevel=2)
    return True
