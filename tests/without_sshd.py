"""A pytest plugin (``-p tests.without_sshd``): as on a machine without sshd."""

from __future__ import annotations

import shutil

_which = shutil.which


def _without(program: str, *args: object, **kwargs: object) -> str | None:
    return None if program == "sshd" else _which(program, *args, **kwargs)


shutil.which = _without
