"""Modules that only Horovod 0.28.1 had, for programs that import more than its public API.

`horovod.runner` installs `OldModules` when it is imported. An old path such as
``horovod.runner.gloo_run`` is no file here: a table says which module of this folder has its names.
docs/old_names.md shows that table to people, and a test compares the two. New code never imports
from this folder.

Some names are refused, because their meaning is not safe to offer: upstream's rendezvous and its
services serve everybody who reaches their ports. Here ranks and launcher communicate through a
store that serves only holders of the job's key (`horovod.common.store`). The names of `REFUSED` can
be imported; using one raises an error that says what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

_RENDEZVOUS = (
    "its rendezvous serves everybody who reaches its port, without authentication. Start jobs with "
    "horovodrun or horovod.run, whose store is authenticated with the job's key; a store of your "
    "own is horovod.common.store.StoreServer"
)
_ELASTIC = (
    "it tells workers what to do through a rendezvous without authentication. Start elastic jobs "
    "with horovodrun or horovod.run (min_num_proc, host_discovery_script), or with "
    "horovod.runner.gloo_run.gloo_run_elastic and a HostDiscovery of your own"
)
_SERVICE = (
    "it unpickles what it gets from a socket. Exchange bytes through horovod.common.store "
    "(StoreServer, StoreClient)"
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
"""The refused names, with the reason and what to use instead."""


@functools.cache
def refuse(name: str) -> type:
    """Return a class that can be imported and derived from, and raises when it is called."""
    message = f"{name} of Horovod 0.28.1 is not offered: {REFUSED[name]}"

    def __init__(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(message)

    return type(name, (), {"__doc__": message, "__module__": __name__, "__init__": __init__})


class OldModule(NamedTuple):
    """A module as Horovod 0.28.1 called it."""

    path: str
    source: str  # the module that has its names now, but for refused ones; the path if it is a file
    names: tuple[str, ...]


def _old(path: str, source: str, names: str) -> OldModule:
    path = f"horovod.{path}"
    source = source if "." in source else f"{__name__}.{source}" if source else path
    return OldModule(path, source, tuple(names.split()))


OLD_MODULES = (
    _old("common.basics", "", "HorovodBasics"),
    _old("common.util", "", "env is_version_greater_equal_than"),
    _old(
        "runner.common.service.compute_service",
        "horovod.runner.compute_service",
        "ComputeClient ComputeService",
    ),
    _old("runner.common.util.codec", "environment", "dumps_base64 loads_base64"),
    _old(
        "runner.common.util.config_parser",
        "settings",
        "set_args_from_config set_env_from_args validate_config_args HOROVOD_FUSION_THRESHOLD",
    ),
    _old(
        "runner.common.util.env",
        "environment",
        "get_env_rank_and_size is_exportable IGNORE_REGEXES",
    ),
    _old("runner.common.util.host_hash", "environment", "host_hash"),
    _old(
        "runner.common.util.hosts",
        "settings",
        "HostInfo SlotInfo INVALID_SLOT_INFO parse_hosts parse_host_files parse_hosts_and_slots "
        "get_host_assignments",
    ),
    _old(
        "runner.common.util.network",
        "horovod.runner.compute_service",
        "NoValidAddressesFound BasicService BasicClient",
    ),
    _old(
        "runner.common.util.safe_shell_exec",
        "utilities",
        "execute terminate_executor_shell_and_children GRACEFUL_TERMINATION_TIME_S",
    ),
    _old(
        "runner.common.util.secret",
        "environment",
        "make_secret_key compute_digest check_digest DIGEST_LENGTH HOROVOD_SECRET_KEY",
    ),
    _old("runner.common.util.settings", "settings", "BaseSettings Settings"),
    _old("runner.common.util.timeout", "settings", "Timeout TimeoutException"),
    _old("runner.util.cache", "utilities", "Cache use_cache"),
    _old("runner.util.lsf", "environment", "LSFUtils"),
    _old(
        "runner.util.network",
        "environment",
        "get_local_host_addresses get_local_intfs get_driver_ip filter_local_addresses "
        "find_port resolve_host_address",
    ),
    _old("runner.util.streams", "utilities", "Pipe"),
    _old("runner.util.threads", "utilities", "in_thread on_event execute_function_multithreaded"),
    _old("runner", "", "run _HorovodArgs"),
    _old(
        "runner.launch",
        "",
        "parse_args run_commandline run_controller is_gloo_used check_build _run _run_elastic",
    ),
    _old(
        "runner.gloo_run",
        "launchers",
        "gloo_run gloo_run_elastic launch_gloo launch_gloo_elastic create_slot_env_vars "
        "create_run_env_vars",
    ),
    _old(
        "runner.mpi_run",
        "launchers",
        "mpi_run mpi_available is_open_mpi is_spectrum_mpi is_mpich is_intel_mpi",
    ),
    _old("runner.task_fn", "launchers", "_task_fn"),
    _old("runner.js_run", "launchers", "js_run is_jsrun_installed"),
    _old("runner.http.http_server", "launchers", "RendezvousServer KVStoreServer"),
    _old("runner.elastic.constants", "environment", "RESET_LIMIT_EXCEEDED_MESSAGE"),
    _old(
        "runner.elastic.discovery",
        "",
        "HostDiscovery HostDiscoveryScript FixedHosts HostManager DiscoveredHosts HostUpdateResult",
    ),
    _old("runner.elastic.driver", "", "ElasticDriver Results DISCOVER_HOSTS_FREQUENCY_SECS"),
    _old("runner.elastic.registration", "environment", "WorkerStateRegistry READY SUCCESS FAILURE"),
    _old(
        "runner.elastic.rendezvous",
        "environment",
        "create_rendezvous_handler GET_RANK_AND_SIZE PUT_WORKER_ADDRESSES",
    ),
    _old("runner.elastic.settings", "settings", "ElasticSettings"),
    _old(
        "runner.elastic.worker",
        "environment",
        "WorkerNotificationManager WorkerNotificationService WorkerNotificationClient "
        "HostsUpdatedRequest HostUpdateResult",
    ),
)

GENERATED = {old.path: old for old in OLD_MODULES if old.source != old.path}
"""The old modules that have no file of their own."""

PACKAGES = {path.rpartition(".")[0] for path in GENERATED} | {"horovod.runner.common"}
"""The packages around them; Python finds those that have files before it asks for these."""

PREFIX = "horovod.runner."


class OldModules:
    """Import hook that makes the modules of `OLD_MODULES`, and the packages around them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load an old module. Python asks only if there is no file."""
        if not name.startswith(PREFIX):
            return None
        if name in PACKAGES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return ModuleSpec(name, self) if name in GENERATED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with its old names."""
        old = GENERATED.get(module.__name__)
        module.__doc__ = "Names of Horovod 0.28.1; see docs/old_names.md."
        if old is None:  # a package, which has nothing of its own
            return
        find = functools.partial(find_old_name, old.source)
        for name in old.names:
            setattr(module, name, find(name))
        vars(module)["__getattr__"] = find  # for names that are made when they are asked for

    def get_code(self, name: str) -> None:
        """Tell ``python -m`` that there is nothing to run."""


def find_old_name(source: str, name: str) -> Any:
    """Return what a name of Horovod 0.28.1 stands for, from the module that has it now."""
    return refuse(name) if name in REFUSED else getattr(importlib.import_module(source), name)


def install() -> None:
    """Make the old modules importable."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())
