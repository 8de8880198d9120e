"""Keys for services under `horovod.runner.common`, which serve only those who know theirs."""

from __future__ import annotations

import hashlib
import hmac

from horovod.common.wire import new_key
from horovod.runner.slots.worker_env import KEY as HOROVOD_SECRET_KEY

__all__ = [
    "DIGEST_LENGTH",
    "HOROVOD_SECRET_KEY",
    "check_digest",
    "compute_digest",
    "make_secret_key",
]

DIGEST_LENGTH = hashlib.sha256().digest_size


def make_secret_key() -> bytes:
    """A fresh random key. It must travel by environment, pipe or private file, never by argv."""
    return new_key()


def compute_digest(key: bytes, body: bytes) -> bytes:
    """What only holders of the key can compute of a message."""
    return hmac.digest(key, body, hashlib.sha256)


def check_digest(key: bytes, body: bytes, digest: bytes) -> bool:
    """Whether a holder of the key made this digest."""
    return hmac.compare_digest(compute_digest(key, body), digest)
