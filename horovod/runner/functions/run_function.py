"""``horovod.run``: call a function on all ranks of a job, from Python.

Users call it from scripts and notebooks, in any thread. The job is the one that ``horovodrun``
would start; its command is `run_task`, which fetches the function from the job's store.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from horovod.common.joining.addresses import LOOPBACK
from horovod.common.joining.launcher_store import SECRET_KEY, STORE_ADDRESS, STORE_PORT
from horovod.common.store import MemoryStore
from horovod.common.wire import encode_key, new_key
from horovod.runner.agents.store_endpoints import StoreEndpoints, addresses_towards
from horovod.runner.functions.function_call import (
    CALL,
    SEARCH_PATH,
    Failure,
    RemoteError,
    as_runtime_error,
    failures,
    put,
    result_name,
    search_path,
    take,
    with_known_sentence,
)
from horovod.runner.jobs import controllers
from horovod.runner.jobs.request import JobRequest, make_request
from horovod.runner.jobs.run_job import run_job
from horovod.runner.options.arguments import as_words, make_options
from horovod.runner.output.report import LaunchError, Outcome
from horovod.runner.slots.hosts import is_local

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,  # nothing is kept between jobs
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in `num_proc` processes, and return the results by rank.

    The arguments mean the same as the options of horovodrun of the same names. Knobs come from the
    environment. The workers run in this process's directory and find the modules that it can
    import. Their output appears with ``[rank]<stdout>:`` before it. An elastic job returns the
    results of its first `min_num_proc` ranks.

    Args:
        func: The function; it is pickled, so it may be defined in a notebook.
        args: Its positional arguments, the same on all ranks.
        kwargs: Its keyword arguments.
        num_proc: How many processes; `np` is the older name.
        min_num_proc: Fewest processes with which an elastic job goes on; `min_np` is the older
            name.
        max_num_proc: Most processes that an elastic job uses; `max_np` is the older name.
        slots: Number of slots of hosts for which none is given (--slots-per-host).
        reset_limit: Number of changes of membership after which an elastic job ends.
        cooldown_range: Shortest and longest seconds for which a failing host of an elastic job is
            not used (--blacklist-cooldown-range).
        hosts: Hosts to run on, such as "node1:4,node2:4"; by default the hosts of the batch job
            that this process belongs to, or this machine.
        hostfile: A file that lists the hosts.
        host_discovery_script: A program that prints the hosts available now.
        start_timeout: Seconds within which all ranks must have started and found each other.
        ssh_port: Port of the other hosts' ssh server.
        ssh_identity_file: Private key for ssh.
        disable_cache: Accepted for compatibility: nothing is kept between jobs.
        output_filename: A folder that also gets each rank's output.
        verbose: 1 to say what is started, where, and how it ended; 2 for more.
        use_gloo: Start the processes directly and through ssh (the default).
        use_mpi: Start them with mpirun.
        mpi_args: More arguments for mpirun.
        network_interface: Older name of `network_interfaces`.
        network_interfaces: Network interfaces to use between hosts, such as "eth0,ib0".
        executable: The Python of the workers.
        np: Older name of `num_proc`.
        min_np: Older name of `min_num_proc`.
        max_np: Older name of `max_num_proc`.

    Raises:
        ValueError: If an argument is wrong, or `func` cannot be pickled.
        RuntimeError: If the job could not be started.
        RemoteError: If a process died, or its exception or result cannot be brought here. Any other
            exception of the function is raised as itself, with its rank and traceback; it is a
            RuntimeError too.

    Examples:
        >>> horovod.run(train, args=(0.1,), num_proc=4)
    """
    num_proc = _newer("np", np, "num_proc") or num_proc
    min_num_proc = _newer("min_np", min_np, "min_num_proc") or min_num_proc
    max_num_proc = _newer("max_np", max_np, "max_num_proc") or max_num_proc
    nics = _newer("network_interface", network_interface, "network_interfaces")
    nics = nics or network_interfaces
    if not callable(func):
        raise ValueError(f"horovod.run needs a function to call, not {func!r}")
    if sum(source is not None for source in (hosts, hostfile, host_discovery_script)) > 1:
        raise ValueError("give one of hosts, hostfile and host_discovery_script")
    if use_gloo and use_mpi:
        raise ValueError("give one of use_gloo and use_mpi")
    given = {
        "-np": num_proc,
        "--min-np": min_num_proc,
        "--max-np": max_num_proc,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--mpi-args": mpi_args,
        "--network-interfaces": nics if isinstance(nics, str) or not nics else ",".join(nics),
        "--blacklist-cooldown-range": None if cooldown_range is None else list(cooldown_range),
        "--gloo": bool(use_gloo),
        "--mpi": bool(use_mpi),
    }
    argv = as_words(given) + ["--verbose"] * min(int(verbose or 0), 2)
    command = [executable or sys.executable, "-m", "horovod.runner.functions.run_task"]
    options = make_options([*argv, "--", *command])
    for notice in options.notices:
        warnings.warn(f"horovod.run: {notice}", stacklevel=2)
    return call_function(options, func, args, kwargs or {})


def _newer(old: str, value: Any, new: str) -> Any:
    if value is not None:
        warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)
    return value


def call_function(
    options: argparse.Namespace,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """Call a function on all ranks of a job, and return the results by rank.

    Args:
        options: The options of the job, whose command is `run_task`.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: If the function cannot be pickled, or an option is wrong.
        RuntimeError: If the job fails; see `run`.
    """
    try:
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs)))
    except Exception as error:
        raise ValueError(
            f"horovod.run cannot send the function or its arguments to the workers: {error}"
        ) from error
    store = MemoryStore()
    put(store, CALL, call)
    store.set(SEARCH_PATH, json.dumps(search_path()).encode())
    # Workers find this Horovod, whatever is installed there.
    folders = filter(None, [_PACKAGE_PARENT, os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    try:
        controller = controllers.choose(options, env)
        if controller == controllers.GLOO:
            name = getattr(func, "__qualname__", "") or type(func).__name__
            outcome = run_job(options, options.command, env=env, store=store, title=name)
            raise_outcome(failures(store), outcome)
        else:
            _run_elsewhere(controller, options, env, store)
    except LaunchError as error:
        kind = ValueError if error.status == 2 else RuntimeError
        raise kind(str(error)) from None
    return collect_results(store, options.min_num_proc if options.elastic else options.num_proc)


def collect_results(store: MemoryStore, count: int) -> list[Any]:
    """Return the results of the first ``count`` ranks.

    Raises:
        RemoteError: If a rank returned nothing, or its result cannot be unpickled.
    """
    results = []
    for rank in range(count):
        content = take(store, result_name(rank))
        if content is None:
            raise RemoteError(
                f"rank {rank} has returned nothing: either its process ended with exit code 0 in "
                f"the middle of the function (os._exit), or this is an elastic job and fewer than "
                f"{count} workers came to its end",
                rank,
            )
        try:
            results.append(cloudpickle.loads(content))
        except Exception as error:
            raise RemoteError(
                f"what rank {rank} returned cannot be unpickled here: {error}", rank
            ) from error
    return results


def _run_elsewhere(
    controller: str, options: argparse.Namespace, env: Mapping[str, str], store: MemoryStore
) -> None:
    """Run the job through mpirun or jsrun, and serve its store at an address that ranks reach."""
    request = make_request(options, options.command, env)
    endpoints = StoreEndpoints(new_key(), store)
    try:
        address, port = endpoints.open(_address(request))
        variables = {
            STORE_ADDRESS: address,
            STORE_PORT: str(port),
            SECRET_KEY: encode_key(endpoints.key),
        }
        request = make_request(options, options.command, {**env, **variables})
        status = controllers.run_and_wait(controllers.make_plan(controller, options, request))
    finally:
        endpoints.close()
    if status != 0:
        raise_first(failures(store))
        program = "mpirun" if controller == controllers.MPI else "jsrun"
        raise RemoteError(f"{program} failed with exit code {status}")


def _address(request: JobRequest) -> str:
    for name in request.hosts:
        if not is_local(name):
            ways = addresses_towards(name, ("", ""), request.nics)
            if not ways:
                raise LaunchError(
                    f"cannot tell which address of this machine leads to {name}; say which "
                    f"network interface does with network_interfaces"
                )
            return ways[0]
    return LOOPBACK


def raise_outcome(reported: Sequence[Failure], outcome: Outcome) -> None:
    """Raise the failure of a job; do nothing if it succeeded.

    Args:
        reported: The failures that its workers have reported.
        outcome: The outcome of the job.
    """
    if outcome.interrupted is not None:
        signal.raise_signal(outcome.interrupted)  # for the handler that was there before the job
        raise RemoteError(f"the job was ended by {signal.Signals(outcome.interrupted).name}")
    first = outcome.first_failure
    if first is not None:
        # Only reports of the worker that failed first count; it may have died without one.
        raise_first([each for each in reported if first.rank == each.rank or first.pid == each.pid])
        raise RemoteError(with_known_sentence(outcome.account.strip()), first.rank)
    if outcome.problem or outcome.account:
        raise RemoteError((outcome.problem or outcome.account).strip())


def raise_first(reported: Sequence[Failure]) -> None:
    """Raise the first failure that no other rank caused, with a `RemoteError` as its cause."""
    for failure in sorted(reported, key=lambda each: each.because_of_others):
        who = "a worker" if failure.rank is None else f"rank {failure.rank}"
        where = f"{who} on {failure.host} (pid {failure.pid})"
        message = f"{where}: {failure.problem}\n\n{failure.traceback}".rstrip()
        remote = RemoteError(with_known_sentence(message), failure.rank, failure.traceback)
        try:
            error = cloudpickle.loads(failure.error) if failure.error is not None else None
        except Exception:  # its class may not be here
            error = None
        if not isinstance(error, Exception):
            raise remote
        error = as_runtime_error(error)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised on {where}")
        raise error from remote
