"""Starting jobs: the ``horovodrun`` command, and ``horovod.run``.

launch -> arguments, hosts, job_request (what to start) -> run_job -> static_job (when, and what a
failure means) -> supervise (the loop) -> host_agent, ssh (one agent for each host) -> report (what
went wrong first). agent, agent_output, bootstrap, cores, frames, probe and processes run on hosts.
controllers hands a job over to mpirun or jsrun. run_function is ``horovod.run``, run_task and
function_call belong to it. gloo_run, mpi_run, js_run, upstream_launch, util, http and common.util
have names of Horovod 0.28.1 (docs/old_names.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.runner.run_function import run
    from horovod.runner.upstream_launch import _HorovodArgs

__all__ = ["_HorovodArgs", "run"]


def __getattr__(name: str) -> Any:
    """``horovod.runner.run`` is ``horovod.run``; who only launches does not pay for it."""
    if name == "run":
        from horovod.runner.run_function import run

        return run
    if name == "_HorovodArgs":
        from horovod.runner.upstream_launch import _HorovodArgs

        return _HorovodArgs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
