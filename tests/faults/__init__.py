"""What happens when processes die, stop, fork, or are used hard. All with real processes."""

from __future__ import annotations

TRANSPORTS = {
    "shm": {"HOROVOD_CPU_OPERATIONS": "shm"},
    "gloo": {"HOROVOD_CPU_OPERATIONS": "gloo"},
}
