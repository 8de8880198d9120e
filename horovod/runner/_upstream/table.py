"""The modules of Horovod 0.28.1 that programs import, with their names: one table.

The import hook of this package is made from it, and the lists in docs/old_names.md:

    python -m horovod.runner._upstream.table docs/old_names.md

Some names are refused, because their meaning is not safe to offer: upstream's rendezvous and its
services serve everybody who reaches their ports. Here ranks and launcher communicate through a
store that serves only holders of the job's key (`horovod.common.store`). The names of `REFUSED` can
be imported; using one raises an error that says what to use instead.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

from horovod.runner.compute_service import NoValidAddressesFound as NoValidAddressesFound


class _Refusal(NamedTuple):
    reason: str
    replacement: str


_RENDEZVOUS = _Refusal(
    "its rendezvous serves everybody who reaches its port, without authentication",
    "Start jobs with horovodrun or horovod.run, whose store is authenticated with the job's key; "
    "a store of your own is horovod.common.store.StoreServer",
)
_ELASTIC = _Refusal(
    "it tells workers what to do through a rendezvous without authentication",
    "Start elastic jobs with horovodrun or horovod.run (min_num_proc, host_discovery_script), or "
    "with horovod.runner.gloo_run.gloo_run_elastic and a HostDiscovery of your own",
)
_SERVICE = _Refusal(
    "it unpickles what it gets from a socket",
    "Exchange bytes through horovod.common.store (StoreServer, StoreClient)",
)

REFUSED = {
    "RendezvousServer": _RENDEZVOUS,
    "KVStoreServer": _RENDEZVOUS,
    "BasicService": _SERVICE,
    "BasicClient": _SERVICE,
    "launch_gloo": _RENDEZVOUS,
    "launch_gloo_elastic": _RENDEZVOUS,
    "ElasticDriver": _ELASTIC,
    "WorkerStateRegistry": _ELASTIC,
    "create_rendezvous_handler": _ELASTIC,
    "WorkerNotificationService": _ELASTIC,
    "WorkerNotificationClient": _ELASTIC,
    "_task_fn": _SERVICE,
}


@functools.cache
def refuse(name: str) -> type:
    """Return a class that can be imported and derived from, and raises when it is called."""
    reason, replacement = REFUSED[name]
    message = f"{name} of Horovod 0.28.1 is not offered: {reason}. {replacement}"

    def __init__(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(message)

    return type(name, (), {"__doc__": message, "__module__": __name__, "__init__": __init__})


def __getattr__(name: str) -> type:
    if name in REFUSED:
        return refuse(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_HERE = "horovod.runner._upstream"


class OldModule(NamedTuple):
    """A module as Horovod 0.28.1 called it."""

    path: str
    source: str
    """The module that has its names now; the path itself if that is a file."""
    names: tuple[str, ...]
    replacement: str
    """What new programs use, for the page; may be empty."""
    remark: str = ""
    """What the page adds to the names."""


def _old(path: str, source: str, names: str, replacement: str = "", remark: str = "") -> OldModule:
    path = f"horovod.{path}"
    source = source if "." in source else f"{_HERE}.{source}" if source else path
    return OldModule(path, source, tuple(names.split()), replacement, remark)


_HORUN = "options of [horovodrun](horovodrun.md)"

OLD_MODULES = (
    _old(
        "common.basics",
        "",
        "HorovodBasics",
        "`horovod.torch` and the other bindings",
    ),
    _old("common.util", "", "env is_version_greater_equal_than"),
    _old(
        "runner.common.service.compute_service",
        "horovod.runner.compute_service",
        "ComputeClient ComputeService",
        "[TensorFlow's data service](tensorflow_data_service.md)",
    ),
    _old("runner.common.util.codec", "environment", "dumps_base64 loads_base64", "`cloudpickle`"),
    _old(
        "runner.common.util.config_parser",
        "settings",
        "set_args_from_config set_env_from_args validate_config_args HOROVOD_FUSION_THRESHOLD",
        "[knobs](knobs.md)",
        "and the variables of all other knobs",
    ),
    _old(
        "runner.common.util.env",
        "environment",
        "get_env_rank_and_size is_exportable IGNORE_REGEXES",
        "`hvd.rank()`, `hvd.size()`",
    ),
    _old("runner.common.util.host_hash", "environment", "host_hash"),
    _old(
        "runner.common.util.hosts",
        "settings",
        "HostInfo SlotInfo INVALID_SLOT_INFO parse_hosts parse_host_files parse_hosts_and_slots "
        "get_host_assignments",
        "`horovod.runner.slots.hosts`",
    ),
    _old(
        "runner.common.util.network",
        "table",
        "NoValidAddressesFound BasicService BasicClient",
        "`horovod.common.store`",
    ),
    _old(
        "runner.common.util.safe_shell_exec",
        "utilities",
        "execute terminate_executor_shell_and_children GRACEFUL_TERMINATION_TIME_S",
        "`subprocess`",
    ),
    _old(
        "runner.common.util.secret",
        "environment",
        "make_secret_key compute_digest check_digest DIGEST_LENGTH HOROVOD_SECRET_KEY",
    ),
    _old("runner.common.util.settings", "settings", "BaseSettings Settings", _HORUN),
    _old("runner.common.util.timeout", "settings", "Timeout TimeoutException"),
    _old("runner.util.cache", "utilities", "Cache use_cache", "nothing is kept between jobs"),
    _old("runner.util.lsf", "environment", "LSFUtils"),
    _old(
        "runner.util.network",
        "environment",
        "get_local_host_addresses get_local_intfs get_driver_ip filter_local_addresses find_port "
        "resolve_host_address",
    ),
    _old("runner.util.streams", "utilities", "Pipe"),
    _old(
        "runner.util.threads",
        "utilities",
        "in_thread on_event execute_function_multithreaded",
        "`concurrent.futures`",
    ),
    _old("runner", "", "run _HorovodArgs", "`horovod.run`"),
    _old(
        "runner.launch",
        "",
        "parse_args run_commandline run_controller is_gloo_used check_build _run _run_elastic",
        "`horovod.run`, [horovodrun](horovodrun.md)",
    ),
    _old(
        "runner.gloo_run",
        "launchers",
        "gloo_run gloo_run_elastic launch_gloo launch_gloo_elastic create_slot_env_vars "
        "create_run_env_vars",
        "`horovod.run`",
    ),
    _old(
        "runner.mpi_run",
        "launchers",
        "mpi_run mpi_available is_open_mpi is_spectrum_mpi is_mpich is_intel_mpi",
        "`horovod.run(use_mpi=True)`",
    ),
    _old("runner.task_fn", "table", "_task_fn", "the hosts' agents"),
    _old("runner.js_run", "launchers", "js_run is_jsrun_installed", "`horovodrun --jsrun`"),
    _old(
        "runner.http.http_server",
        "table",
        "RendezvousServer KVStoreServer",
        "`horovod.common.store`",
    ),
    _old("runner.elastic.constants", "environment", "RESET_LIMIT_EXCEEDED_MESSAGE"),
    _old(
        "runner.elastic.discovery",
        "",
        "HostDiscovery HostDiscoveryScript FixedHosts HostManager DiscoveredHosts HostUpdateResult",
    ),
    _old(
        "runner.elastic.driver",
        "",
        "ElasticDriver Results DISCOVER_HOSTS_FREQUENCY_SECS",
        "`horovodrun --min-np`",
    ),
    _old("runner.elastic.registration", "environment", "WorkerStateRegistry READY SUCCESS FAILURE"),
    _old(
        "runner.elastic.rendezvous",
        "environment",
        "create_rendezvous_handler GET_RANK_AND_SIZE PUT_WORKER_ADDRESSES",
    ),
    _old("runner.elastic.settings", "settings", "ElasticSettings", _HORUN),
    _old(
        "runner.elastic.worker",
        "environment",
        "WorkerNotificationManager WorkerNotificationService WorkerNotificationClient "
        "HostsUpdatedRequest HostUpdateResult",
        "`hvd.elastic`",
    ),
)

GENERATED = {old.path: old for old in OLD_MODULES if old.source != old.path}
"""The old modules that have no file of their own."""

PACKAGES = {
    "horovod.runner.common",
    "horovod.runner.common.service",
    "horovod.runner.common.util",
    "horovod.runner.http",
    "horovod.runner.util",
}


def generated_parts() -> dict[str, str]:
    """Return the parts of docs/old_names.md that repeat this table, by name."""
    rows = ["| Module | What it has | Now |\n", "|---|---|---|\n"]
    for old in OLD_MODULES:
        names = ", ".join(f"`{name}`" for name in old.names)
        names += f" {old.remark}" if old.remark else ""
        end = f" {old.replacement} |" if old.replacement else " |"
        rows.append(f"| `{old.path}` | {names} |{end}\n")
    return {"modules": "".join(rows), "refused": "".join(f"- `{name}`\n" for name in REFUSED)}


if __name__ == "__main__":
    import sys
    from pathlib import Path

    from horovod.runner.options.page import fill_in

    path = Path(sys.argv[1])
    path.write_text(fill_in(path.read_text("utf-8"), generated_parts()), "utf-8")
