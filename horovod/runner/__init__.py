"""Starting jobs: the ``horovodrun`` command, and ``horovod.run``.

launch is the command; check_build and scaling (with scaling_report) are what its options of these
names do. The rest is in folders, each of which imports only those after it: functions
(``horovod.run``), jobs (fixed ranks), elastic (ranks that come and go), options (what the command
line means), agents (the processes on the hosts) and dashboard, output (what people see), slots
(which rank runs where). compute_service is where the processes of TensorFlow's data service meet.
Modules that only Horovod 0.28.1 had (docs/old_names.md) are made by _upstream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod.runner._upstream import install

if TYPE_CHECKING:
    from horovod.runner.functions.run_function import run

__all__ = ["run"]

install()


def __getattr__(name: str) -> Any:
    """``horovod.runner.run`` is ``horovod.run``; who only launches does not pay for it."""
    if name == "run":
        from horovod.runner.functions.run_function import run

        return run
    if name == "_HorovodArgs":
        from horovod.runner._upstream.launch import _HorovodArgs

        return _HorovodArgs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
