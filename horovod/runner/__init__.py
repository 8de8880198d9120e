"""Start jobs: the ``horovodrun`` command, and ``horovod.run``.

`launch` is the command; `check_build`, `plan` and `scaling` are its options of these names. The
rest is in folders, each of which imports only those after it: `functions` (``horovod.run``), `jobs`
(fixed ranks), `elastic` (ranks that come and go), `options` (the command line), `agents` (the
processes on the hosts), `output` (what people see), `slots` (on which host each rank runs). In
`compute_service` the processes of TensorFlow's data service find each other. `_upstream` makes
modules that only Horovod 0.28.1 had (docs/old_names.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod.runner._upstream import install

if TYPE_CHECKING:
    from horovod.runner.functions.run_function import run

__all__ = ["run"]

install()


def __getattr__(name: str) -> Any:
    """Import ``run``, which is ``horovod.run``, and old names only when they are asked for."""
    if name == "run":
        from horovod.runner.functions.run_function import run

        return run
    if name == "_HorovodArgs":
        from horovod.runner._upstream.launchers import _HorovodArgs

        return _HorovodArgs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
