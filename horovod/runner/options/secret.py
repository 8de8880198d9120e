"""Read or make the secret with which hosts join a job, from a file or from the environment.

``horovodrun --listen`` and ``horovodrun --join`` call `job_secret`. The secret is never an
argument, because every user of a machine sees the arguments of all processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from horovod.common.launcher_store import SECRET_KEY
from horovod.common.wire import decode_key, encode_key, new_key

_PAUSE = 0.2
_MAX_BYTES = 4096


def job_secret(
    path: str | None, environ: Mapping[str, str], *, make: bool = False, patience: float = 0.0
) -> bytes:
    """Return the secret in a file, or in the environment if no file is named.

    Args:
        path: The file; None stands for the environment.
        environ: The environment.
        make: Whether to make a file that does not exist, readable by its owner alone.
        patience: Seconds to wait for a file that does not exist, if it is not to be made.

    Raises:
        ValueError: If the secret is missing or wrong; the message never shows what is in the file.
    """
    if path is None:
        if not environ.get(SECRET_KEY):
            raise ValueError(
                f"hosts join with a secret, and there is none: name a file with --secret-file, or "
                f"set {SECRET_KEY} to the same base64 form of 32 random bytes everywhere"
            )
        return decode_key(environ[SECRET_KEY])
    path = os.path.expanduser(path)
    try:
        if make and not os.path.exists(path):
            return _make(path)
        return _read(path, time.monotonic() + patience)
    except OSError as error:
        raise ValueError(f"argument --secret-file: {path!r}: {error.strerror}") from None


def _make(path: str) -> bytes:
    """Make a secret and its file, which appears with its whole content or not at all."""
    key = new_key()
    draft = f"{path}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(encode_key(key) + "\n")
    os.replace(draft, path)
    return key


def _read(path: str, deadline: float) -> bytes:
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    with open(path, encoding="ascii", errors="replace") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o077 or status.st_uid not in (os.getuid(), 0):
            raise ValueError(
                f"argument --secret-file: others may read or change {path!r}: chmod 600 {path}"
            )
        try:
            return decode_key(file.read(_MAX_BYTES).strip())
        except ValueError as error:
            raise ValueError(f"argument --secret-file: {path!r}: {error}") from None
