"""The modules of Horovod 0.28.1 in docs/old_names.md: they import, and do what they say."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from horovod.runner.common.util import (
    codec,
    config_parser,
    host_hash,
    hosts,
    safe_shell_exec,
    secret,
    timeout,
)
from horovod.runner.common.util import env as env_util
from horovod.runner.common.util.settings import Settings
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.elastic.worker import WorkerNotificationManager
from horovod.runner.util import network, streams, threads
from horovod.runner.util.cache import Cache, use_cache
from horovod.runner.util.lsf import LSFUtils

import horovod.torch as hvd
from horovod.common.util import env
from horovod.runner import _HorovodArgs, gloo_run, js_run, launch, mpi_run
from horovod.runner._upstream import OLD_MODULES, REFUSED, OldModule
from horovod.runner.elastic.discovery import FixedHosts, HostManager, HostUpdateResult
from horovod.runner.functions.function_call import FAILED
from horovod.runner.options.arguments import make_options

PAGE = Path(__file__).parents[2] / "docs" / "old_names.md"

SIGNATURES = {
    "execute": "command env=None stdout=None stderr=None index=None events=None "
    "prefix_output_with_timestamp=False",
    "in_thread": "target args=() name=None daemon=True silent=False",
    "on_event": "event func args=() stop=None check_stop_interval_s=1.0 daemon=True silent=False",
    "execute_function_multithreaded": "fn args_list block_until_all_done=True "
    "max_concurrent_executions=1000",
    "get_host_assignments": "hosts min_num_proc max_num_proc=None",
    "SlotInfo": "hostname rank local_rank cross_rank size local_size cross_size",
    "dumps_base64": "obj to_ascii=True",
    "host_hash": "salt=None",
    "Timeout": "timeout message",
    "gloo_run": "settings nics env server_ip command",
    "create_run_env_vars": "server_ip nics port elastic=False",
    "mpi_run": "settings nics env command stdout=None stderr=None",
    "js_run": "settings nics env command stdout=None stderr=None",
    "run_controller": "use_gloo gloo_run use_mpi mpi_run use_jsrun js_run verbosity",
    "is_gloo_used": "use_gloo=None use_mpi=None use_jsrun=None",
    "check_build": "verbose",
    "_run": "args",
    "_run_elastic": "args",
    "Cache": "cache_folder cache_staleness_threshold_in_minutes parameters_hash",
    "Results": "error_message worker_results",
    "HostsUpdatedRequest": "timestamp res=0",
    "HorovodBasics": "pkg_path=None args",
    "HostDiscoveryScript": "discovery_script slots",
    "HostManager": "discovery cooldown_range=None",
}


@pytest.mark.parametrize("old", OLD_MODULES, ids=lambda old: old.path)
def test_every_module_has_its_names(old: OldModule):
    found = importlib.import_module(old.path)
    for name in old.names:
        thing = getattr(found, name)
        if name in SIGNATURES:
            parameters = list(inspect.signature(thing).parameters.values())
            shown = [
                p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
            ]
            wanted = SIGNATURES[name].split()
            assert shown[: len(wanted)] == wanted, name
        if (
            inspect.isclass(thing)
            and thing.__module__ == old.source
            and not inspect.isabstract(thing)
        ):
            assert pickle.loads(pickle.dumps(thing)) is thing


def test_the_page_has_the_modules_and_names_of_the_table():
    page = PAGE.read_text()
    rows = [
        re.findall(r"`([\w.]+)`", row.rpartition("|")[0].rpartition("|")[0])
        for row in re.findall(r"^\| (`horovod\..*)$", page, re.MULTILINE)
    ]
    assert rows == [[old.path, *old.names] for old in OLD_MODULES]
    refused = page.partition("What is refused")[2].partition("Methods of classes")[0]
    assert re.findall(r"^- `(\w+)`$", refused, re.MULTILINE) == list(REFUSED)
    assert set(SIGNATURES) <= {name for old in OLD_MODULES for name in old.names}


def test_a_module_that_upstream_does_not_have_is_not_there_either():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'horovod\.runner\.nothing'"):
        importlib.import_module("horovod.runner.nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gloo_run.nothing  # noqa: B018
    assert config_parser.HOROVOD_CYCLE_TIME == "HOROVOD_CYCLE_TIME"  # not in the table by name


def test_what_is_not_safe_raises_with_the_reason_and_the_new_way():
    refused = [(old, name) for old in OLD_MODULES for name in old.names if name in REFUSED]
    assert {name for _, name in refused} == set(REFUSED)
    for old, name in refused:
        thing = getattr(importlib.import_module(old.path), name)
        with pytest.raises(NotImplementedError, match=rf"^{name} of Horovod .* horovod"):
            type("OfTheProgram", (thing,), {})("an argument", verbose=2)


# -- jobs ----------------------------------------------------------------------------------------

WORKER = "import os, sys; print('rank', os.environ['HOROVOD_RANK']); sys.exit(int(sys.argv[1]))"


def test_gloo_run(capfd: pytest.CaptureFixture[str]):
    settings = Settings(num_proc=2, hosts="localhost:2", start_timeout=timeout.Timeout(60, "x"))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    gloo_run.gloo_run(settings, None, environ, None, [sys.executable, "-c", WORKER, "0"])
    out = capfd.readouterr().out
    assert "[0]<stdout>:rank 0\n" in out
    assert "[1]<stdout>:rank 1\n" in out
    with pytest.raises(RuntimeError, match=FAILED):
        gloo_run.gloo_run(settings, None, environ, None, [sys.executable, "-c", WORKER, "3"])


def test_gloo_run_elastic_with_a_discovery_of_ones_own(capfd: pytest.CaptureFixture[str]):
    settings = ElasticSettings(
        discovery=FixedHosts({"localhost": 2}),
        num_proc=2,
        min_num_proc=2,
        max_num_proc=2,
        elastic_timeout=60,
        reset_limit=1,
    )
    command = [sys.executable, "-c", WORKER, "0"]
    gloo_run.gloo_run_elastic(settings, {**os.environ, "OMP_NUM_THREADS": "1"}, command)
    assert "[1]<stdout>:rank 1\n" in capfd.readouterr().out
    assert pickle.loads(pickle.dumps(settings)).discovery is None


def test_mpi_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path}
    if not mpi_run.mpi_available(environ):
        pytest.skip("there is no mpirun")
    kinds = (mpi_run.is_open_mpi, mpi_run.is_spectrum_mpi, mpi_run.is_mpich, mpi_run.is_intel_mpi)
    assert sum(kind(environ) for kind in kinds) == 1
    settings = Settings(num_proc=2, hosts="localhost:2", run_func_mode=True)
    program = f"open('{tmp_path}/' + __import__('os').environ['OMPI_COMM_WORLD_RANK'], 'w')"
    mpi_run.mpi_run(settings, None, environ, [sys.executable, "-c", program])
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    with pytest.raises(RuntimeError, match="mpirun failed with exit code 5"):
        mpi_run.mpi_run(settings, None, environ, [sys.executable, "-c", "exit(5)"])
    assert not mpi_run.mpi_available({"PATH": str(tmp_path)})
    assert not mpi_run.is_mpich({"PATH": str(tmp_path)})
    assert not js_run.is_jsrun_installed()
    with pytest.raises(ValueError, match="no LSF job"):
        js_run.js_run(settings, None, {}, ["x"])


def test_a_job_described_by_attributes(capfd: pytest.CaptureFixture[str]):
    def place() -> tuple[str, str]:  # local: to find it here, ranks would import all of this
        return os.environ["HOROVOD_RANK"], os.environ["HOROVOD_CACHE_CAPACITY"]

    args: Any = _HorovodArgs()
    assert (args.num_proc, args.hosts, args.run_func, args.use_mpi) == (1, None, None, None)
    args.num_proc, args.cache_capacity, args.start_timeout = 2, 12, 60
    args.hierarchical_allreduce, args.nics, args.verbose = False, {"lo"}, 0
    args.command = [sys.executable, "-c", WORKER, "0"]
    assert launch._run(args) is None
    assert "[1]<stdout>:rank 1\n" in capfd.readouterr().out
    args.command[-1] = "3"
    with pytest.raises(RuntimeError, match=FAILED):
        launch._run(args)
    args.run_func = place
    assert launch._run(args) == [("0", "12"), ("1", "12")]
    with pytest.raises(ValueError, match=r"not elastic: give min_num_proc \(--min-np\)"):
        launch._run_elastic(args)
    args.min_num_proc = args.max_num_proc = 2
    args.reset_limit, args.cooldown_range = 1, (1, 2)
    assert launch._run_elastic(args) == [("0", "12"), ("1", "12")]
    args.cache_capacity = -1
    with pytest.raises(ValueError, match="--cache-capacity"):
        launch._run(args)


def test_a_job_described_by_options(capfd: pytest.CaptureFixture[str]):
    worker = [sys.executable, "-c", WORKER]
    launch._run(launch.parse_args(["-np", "2", *worker, "0"]))
    assert "[0]<stdout>:rank 0\n" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="'no-such-program'"):
        launch._run(launch.parse_args(["-np", "2", "no-such-program"]))
    with pytest.raises(ValueError, match="not elastic"):
        launch._run_elastic(launch.parse_args(["-np", "2", *worker, "0"]))


def test_who_starts_the_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    called: list[str] = []

    def choose(**how: bool) -> None:
        given = {"use_gloo": None, "use_mpi": None, "use_jsrun": None, **how}
        functions = {f"{name}_run": lambda name=name: called.append(name) for name in _STARTERS}
        launch.run_controller(**given, **functions, verbosity=None)
        assert launch.is_gloo_used(**how) == (called[-1] == "gloo")

    monkeypatch.delenv("LSB_JOBID", raising=False)
    choose()
    choose(use_gloo=True)
    assert called == ["gloo", "gloo"]
    with pytest.raises(ValueError, match=r"this is no LSF job|needs mpi4py"):
        choose(use_jsrun=True)
    assert not launch.is_gloo_used(use_mpi=True)
    if not importlib.util.find_spec("mpi4py"):
        pytest.skip("there is no mpi4py")
    choose(use_mpi=True)
    monkeypatch.setenv("LSB_JOBID", "1")
    choose(use_jsrun=True)
    choose()
    (tmp_path / "jsrun").write_text("#!/bin/sh\n")
    (tmp_path / "jsrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    choose()
    assert called[2:] == ["mpi", "js", "gloo", "js"]


_STARTERS = ("gloo", "mpi", "js")


def test_variables_of_workers():
    slot = hosts.SlotInfo("node", 3, 1, 1, 4, 2, 2)
    assert slot.to_response_string() == "3,4,1,2,1,2"
    assert gloo_run.create_slot_env_vars(slot) == {
        "HOROVOD_HOSTNAME": "node",
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }
    common = gloo_run.create_run_env_vars("10.0.0.1", ["eth0", "eth1"], 1234, elastic=True)
    assert common["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "1234"
    assert common["NCCL_SOCKET_IFNAME"] == "eth0,eth1"
    assert common["HOROVOD_GLOO_IFACE"] == "eth0"
    assert common["HOROVOD_ELASTIC"] == "1"
    assert "HOROVOD_ELASTIC" not in gloo_run.create_run_env_vars("a", [], 1)


# -- hosts and variables ---------------------------------------------------------------------------


def test_hosts(tmp_path: Path):
    found = hosts.parse_hosts("a:2,b:1")
    assert found == [hosts.HostInfo("a", 2), hosts.HostInfo("b", 1)]
    assert hosts.HostInfo.from_string("a:2") == found[0]
    assert hosts.parse_hosts_and_slots("a:2,b:1") == (["a", "b"], {"a": 2, "b": 1})
    with pytest.raises(ValueError, match="'a' has no number of slots"):
        hosts.parse_hosts("a")
    (tmp_path / "hosts").write_text("a slots=2\n\n# more\nb slots=1\n")
    assert hosts.parse_host_files(str(tmp_path / "hosts")) == "a:2,b:1"
    slots = hosts.get_host_assignments(found, 2)
    assert [(s.hostname, s.rank, s.local_rank, s.cross_rank, s.cross_size) for s in slots] == [
        ("a", 0, 0, 0, 2),
        ("a", 1, 1, 0, 1),
        ("b", 2, 0, 1, 2),
    ]
    assert len(hosts.get_host_assignments(found, 1, 2)) == 2
    with pytest.raises(ValueError, match="offer 3 slots"):
        hosts.get_host_assignments(found, 4)
    assert hosts.INVALID_SLOT_INFO.to_response_string() == "-1,-1,-1,-1,-1,-1"


def test_rank_and_size_by_variables(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if re.match("HOROVOD_|OMPI_|PMI_", name):
            monkeypatch.delenv(name)
    assert env_util.get_env_rank_and_size() == (0, 1)
    with env(PMI_RANK="1", PMI_SIZE="3", OTHER=None):
        assert env_util.get_env_rank_and_size() == (1, 3)
        with env(HOROVOD_RANK="2", HOROVOD_SIZE="4"):
            assert env_util.get_env_rank_and_size() == (2, 4)
        with env(OMPI_COMM_WORLD_RANK="2"), pytest.raises(RuntimeError, match="SIZE is missing"):
            env_util.get_env_rank_and_size()
    assert "PMI_RANK" not in os.environ
    assert "OTHER" not in os.environ
    assert env_util.is_exportable("PATH")
    assert not env_util.is_exportable("BASH_FUNC_x")
    assert not env_util.is_exportable("_HOROVOD_SECRET_KEY")


def test_configuration():
    args = make_options(["-np", "1", "--cycle-time-ms", "3", "x"])
    config = {"params": {"fusion_threshold_mb": 32, "cycle_time_ms": 9}, "controller": "gloo"}
    config["stall_check"] = {"enabled": False}
    config_parser.set_args_from_config(args, config, {"cycle_time_ms"})
    config_parser.validate_config_args(args)
    environ = config_parser.set_env_from_args({"KEPT": "1"}, args)
    assert args.use_gloo
    assert environ["KEPT"] == "1"
    assert environ[config_parser.HOROVOD_FUSION_THRESHOLD] == str(32 * 1024 * 1024)
    assert environ[config_parser.HOROVOD_CYCLE_TIME] == "3.0"
    assert environ[config_parser.HOROVOD_STALL_CHECK_DISABLE] == "1"
    args.cache_capacity = -1
    with pytest.raises(ValueError, match="cache_capacity=-1 must be >= 0"):
        config_parser.validate_config_args(args)
    for name, value in vars(config_parser).items():
        if name.startswith("HOROVOD_"):
            assert value == name


def test_small_things(monkeypatch: pytest.MonkeyPatch):
    thing = {"a": [1, (2,)]}
    assert codec.loads_base64(codec.dumps_base64(thing)) == thing
    assert isinstance(codec.dumps_base64(thing, to_ascii=False), bytes)
    assert host_hash.host_hash() == host_hash.host_hash() != host_hash.host_hash("salt")
    key = secret.make_secret_key()
    digest = secret.compute_digest(key, b"body")
    assert len(digest) == secret.DIGEST_LENGTH == 32
    assert secret.check_digest(key, b"body", digest)
    assert not secret.check_digest(key, b"Body", digest)
    late = timeout.Timeout(0, "Timed out waiting for {activity}.")
    assert late.timed_out()
    with pytest.raises(
        timeout.TimeoutException, match=r"waiting for tea\. Timeout after 0 seconds\."
    ):
        late.check_time_out_for("tea")
    early = timeout.Timeout(6000, "")
    early.check_time_out_for("tea")
    assert 5000 < early.remaining() <= 6000 <= early.timeout_at() - time.time() + 1000
    assert "127.0.0.1" in network.get_local_host_addresses()
    assert network.get_local_intfs() == {"lo"}
    assert network.get_driver_ip(["lo"]) == "127.0.0.1"
    assert network.resolve_host_address("localhost") == "127.0.0.1"
    assert network.filter_local_addresses(["localhost", "elsewhere.example"]) == [
        "elsewhere.example"
    ]
    assert network.find_port(lambda address: address[0]) == ("", pytest.approx(33000, abs=33000))
    monkeypatch.setenv("LSB_JOBID", "1")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 2 b 3")
    assert (LSFUtils.using_lsf(), LSFUtils.get_num_processes()) == (True, 5)
    assert LSFUtils.get_compute_hosts() == ["a", "b"]


def test_a_cache(tmp_path: Path):
    folder, calls = str(tmp_path / "new"), []

    @use_cache()
    def interfaces(*hosts: str, port: int = 22) -> set[str]:
        calls.append(hosts)
        return {"eth0", *hosts}

    cache = Cache(folder, 60, "these")
    assert cache.get("key") is None
    for _ in range(2):
        assert interfaces("a", port=1, fn_cache=cache) == {"eth0", "a"}
    assert interfaces("a", port=2, fn_cache=Cache(folder, 60, "these")) == {"eth0", "a"}
    assert interfaces("a", port=1, fn_cache=Cache(folder, 60, "these")) == {"eth0", "a"}
    assert len(calls) == 2, "the last one is from the file"
    assert interfaces("b") == interfaces("b") == {"eth0", "b"}
    assert len(calls) == 4, "without a cache"
    key, lock = ("any", 1), threading.Lock()
    cache.put(key, lock)
    assert cache.get(key) is lock
    assert Cache(folder, 60, "these").get(key) is None, "not a literal"
    cache.put("plain", [1, (2.5, None)])
    assert Cache(folder, 60, "these").get("plain") == [1, (2.5, None)]
    assert Cache(folder, 60, "others").get("plain") is None
    assert Cache(folder, 0, "these").get("plain") is None
    (file,) = Path(folder).iterdir()
    assert file.stat().st_mode & 0o077 == 0
    for damage in ("[", "__import__('os').abort()", "('these', 3)", "('these', {1: 2})", "\0"):
        file.write_text(damage)
        assert Cache(folder, 60, "these").get("plain") is None


# -- processes and threads -------------------------------------------------------------------------


def test_a_shell_command_and_its_output():
    out, err = io.StringIO(), io.StringIO()
    assert safe_shell_exec.execute("echo a; echo b >&2; exit 4", {}, out, err, index=2) == 4
    assert (out.getvalue(), err.getvalue()) == ("[2]<stdout>:a\n", "[2]<stderr>:b\n")
    out = io.StringIO()
    assert safe_shell_exec.execute("printf 'x\\ry'; kill -9 $$", None, out) == 137
    assert out.getvalue() == "x\ry"


def test_an_event_ends_a_command_with_all_that_it_started(tmp_path: Path):
    event = threading.Event()
    out = io.StringIO()
    command = f"sleep 1000 & echo $! > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/child; wait"
    results: list[int] = []
    run: Any = threads.in_thread(
        lambda: results.append(safe_shell_exec.execute(command, None, out, out, events=[event]))
    )
    while not (tmp_path / "child").exists():
        time.sleep(0.01)  # between looks at the file system
    child = int((tmp_path / "child").read_text())
    event.set()
    run.join(60)
    assert results == [143]
    deadline = time.monotonic() + 60
    while state_of(child) not in ("", "Z"):  # killed, and gone when it gets the processor
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between looks at the process table


def state_of(pid: int) -> str:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1]


def test_threads():
    assert threads.execute_function_multithreaded(lambda a, b: a * b, [(1, 2), (3, 4)]) == {
        0: 2,
        1: 12,
    }
    event, stop, seen = threading.Event(), threading.Event(), []
    thread = threads.on_event(event, seen.append, (1,), stop=stop, check_stop_interval_s=0.01)
    event.set()
    thread.join(30)
    other = threads.on_event(threading.Event(), seen.append, (2,), stop, 0.01)
    stop.set()
    other.join(30)
    assert seen == [1]
    with pytest.raises(ValueError, match="tuple"):
        threads.in_thread(print, "x")


def test_a_pipe():
    pipe = streams.Pipe()
    pipe.write("hello")
    assert pipe.read(2) == "he"
    assert pipe.read() == "llo"
    assert pipe.read(timeout=0.01) is None
    writer = threads.in_thread(lambda: [pipe.write(text) for text in ("a", "b")])
    assert [pipe.read(timeout=30), pipe.read(timeout=30)] == ["a", "b"]
    writer.join(30)
    pipe.close()
    assert pipe.read() is None
    with pytest.raises(RuntimeError, match="closed"):
        pipe.write("x")


# -- the basics ----------------------------------------------------------------------------------


def test_the_basics_of_a_c_library_that_is_not_there():
    basics = importlib.import_module("horovod.common.basics")
    made = basics.HorovodBasics("/somewhere/mpi_lib_v2.so", "mpi_lib_v2")
    assert isinstance(made.is_initialized(), bool)
    assert (made.Average, made.Sum) == (hvd.Average, hvd.Sum)
    names = ["INIT", "DYNAMIC", "UNKNOWN_SET", "FOREIGN_SET", "SHUTDOWN", "EXISTING_SET"]
    codes = [getattr(made, f"HOROVOD_PROCESS_SET_ERROR_{name}") for name in names]
    assert codes == [-1, -2, -3, -4, -5, -6]
    with pytest.raises(AttributeError, match="no attribute 'MPI_LIB'"):
        basics.MPI_LIB  # noqa: B018


# -- elastic -------------------------------------------------------------------------------------


def test_host_manager():
    manager = HostManager(FixedHosts({"a": 1, "b": 1}))
    assert manager.update_available_hosts() == HostUpdateResult.added
    event = manager.get_host_event("a")
    assert not event.is_set()
    manager.blacklist("a")
    assert event.is_set()
    assert manager.get_host_event("a") is event
    assert not manager.get_host_event("b").is_set()
    manager.record_failure("b")
    assert manager.get_host_event("b").is_set()
    assert HostManager.order_available_hosts(["d", "b", "a"], ["a", "c", "b"]) == ["a", "b", "d"]


def test_notices_reach_listeners():
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[float, int]] = []

        def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
            self.heard.append((timestamp, update_res))

    manager, listener = WorkerNotificationManager(), Listener()
    manager.init()
    manager.register_listener(listener)
    manager.register_listener(listener)
    manager.handle_hosts_updated(1.0, HostUpdateResult.added)
    manager.remove_listener(listener)
    manager.handle_hosts_updated(2.0, HostUpdateResult.removed)
    assert listener.heard == [(1.0, 2)]
