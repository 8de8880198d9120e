"""Imported by the tests' fork server, so that all programs of Ray can be forked: see `conftest`.

Ray's library keeps two things for a process that forked ones must not share. It reads the
environment once, when it is loaded; a worker finds there which job and raylet are its own
(RAY_JOB_ID, RAY_RAYLET_PID). So what is forked reads it again. And its random numbers are seeded
when they are first used. If that was here, all processes would choose the same names for their
placement groups. So names that are made here come from Python.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from unittest import mock

import ray
import ray.actor

_GUARD = b"_ZGVZN9RayConfig8instanceEvE6config"
"""The C++ compiler's variable that says whether `RayConfig::instance` has made its object."""

_SYMBOLS = 2  # the type of the section with all symbols of a library


def _find_guard(library: Path) -> int:
    """Return the address of `_GUARD` in a library that is loaded."""
    content = library.read_bytes()
    (start,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, start + i * size) for i in range(count)]
    (symbols,) = (section for section in sections if section[1] == _SYMBOLS)
    names = sections[symbols[6]]
    name = content.index(b"\0%s\0" % _GUARD, names[4], names[4] + names[5]) + 1 - names[4]
    table = content[symbols[4] : symbols[4] + symbols[5]]
    (offset,) = (entry[4] for entry in struct.iter_unpack("<IBBHQQ", table) if entry[0] == name)
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if library.name in line
    ]
    return offset + min(int(line.split("-")[0], 16) for line in maps)


class _ActorClassID(ray.ActorClassID):
    """Names for classes of actors, from the system's random numbers and not from Ray's."""

    @classmethod
    def from_random(cls) -> ray.ActorClassID:
        return ray.ActorClassID(os.urandom(cls.size()))


_guard = ctypes.c_uint64.from_address(_find_guard(Path(ray._raylet.__file__)))
# The next who asks for a setting makes the object anew: after the process got its environment.
os.register_at_fork(after_in_child=lambda: setattr(_guard, "value", 0))
with mock.patch.object(ray.actor, "ActorClassID", _ActorClassID):
    import ray.data
    import ray.train.v2.api.data_parallel_trainer
    import ray.tune
