"""The command line: what it means, and what it says about mistakes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from horovod.runner.options.arguments import parse_args
from horovod.runner.options.tunables import TUNABLES
from horovod.runner.slots.hosts import Host


def parsed(*arguments: str, environ: dict[str, str] | None = None, num_proc: str = "4"):
    return parse_args(["-np", num_proc, *arguments, "cmd"], environ or {})


def refused(
    capsys: pytest.CaptureFixture[str], *arguments: str, environ: dict[str, str] | None = None
) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_args(arguments, environ or {})
    assert exit_info.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "discover.sh"
    path.write_text("#!/bin/sh\necho localhost:2\n")
    path.chmod(0o755)
    return path


def test_everything_after_the_first_positional_is_the_command():
    options = parse_args(
        ["-np", "3", "--verbose", "python", "-v", "train.py", "-np", "7", "--", "--verbose", "-H"]
    )
    assert options.num_proc == 3
    assert options.command == ["python", "-v", "train.py", "-np", "7", "--", "--verbose", "-H"]
    assert not options.version


def test_a_double_dash_may_come_before_the_command():
    options = parse_args(["-np", "1", "--", "cmd", "--", "x"])
    assert options.command == ["cmd", "--", "x"]


UPSTREAM = [
    ("-np 3", "num_proc", 3),
    ("--num-proc 3", "num_proc", 3),
    ("--disable-cache", "disable_cache", True),
    ("--start-timeout 20", "start_timeout", 20),
    ("--network-interfaces eth0,eth1", "network_interfaces", ["eth0", "eth1"]),
    ("--network-interface a --network-interface b,a", "network_interfaces", ["a", "b"]),
    ("--output-filename logs", "output_filename", "logs"),
    ("--verbose", "verbose", True),
    ("-p 2222", "ssh_port", 2222),
    ("--ssh-port 2222", "ssh_port", 2222),
    ("-prefix-timestamp", "prefix_timestamp", True),
    ("--prefix-output-with-timestamp", "prefix_timestamp", True),
    ("--min-np 2", "min_num_proc", 2),
    ("--min-num-proc 2", "min_num_proc", 2),
    ("--max-np 9", "max_num_proc", 9),
    ("--max-num-proc 9", "max_num_proc", 9),
    ("--slots-per-host 2", "slots_per_host", 2),
    ("--slots 2", "slots_per_host", 2),
    ("--elastic-timeout 60", "elastic_timeout", 60),
    ("--reset-limit 0", "reset_limit", 0),
    ("--blacklist-cooldown-range 10 100", "blacklist_cooldown_range", [10, 100]),
    ("-H localhost:4", "hosts", [Host("localhost", 4)]),
    ("--hosts a:2,b:2", "hosts", [Host("a", 2), Host("b", 2)]),
    ("--gloo", "use_gloo", True),
    ("--mpi", "use_mpi", True),
    ("--mpi-args=-x", "mpi_args", "-x"),
    ("--tcp", "tcp_flag", True),
    ("--binding-args=--bind-to", "binding_args", "--bind-to"),
    ("--autotune-log-file f", "autotune_log_file", "f"),
    ("--num-nccl-streams 2", "num_nccl_streams", 2),
    ("--dry-run", "dry_run", True),
    ("--output-ranks 0,2-3", "output_ranks", [0, 2, 3]),
    ("--cpu-bind numa", "cpu_bind", "numa"),
    ("--max-worker-failures 5", "max_worker_failures", 5),
]


@pytest.mark.parametrize(("arguments", "name", "value"), UPSTREAM)
def test_spellings(arguments: str, name: str, value: object):
    options = parsed(*arguments.split())
    assert getattr(options, name) == value
    assert options.command == ["cmd"]


def test_defaults():
    options = parsed()
    assert options.hosts == [Host("localhost", 4)]
    assert options.cpu_bind == "none"
    assert options.notices == []
    assert not options.elastic
    assert {options.use_gloo, options.use_mpi, options.use_jsrun, options.dry_run} == {False}
    assert options.output_ranks is options.network_interfaces is options.ssh_port is None


@pytest.mark.parametrize(
    "arguments", ["-v", "--version", "-cb", "--check-build", "-cb --verbose", "-np 2 -cb"]
)
def test_information_needs_nothing_else(arguments: str):
    options = parse_args(arguments.split(), {})
    assert options.version or options.check_build


def test_files(tmp_path: Path, script: Path, capsys):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two\na slots=2\n\nb:2\n")
    for flag in ("-hostfile", "--hostfile"):
        assert parsed(flag, str(hostfile)).hosts == [Host("a", 2), Host("b", 2)]
    assert parsed("-i", str(hostfile)).ssh_identity_file == str(hostfile)
    status = str(tmp_path / "status.json")
    assert parsed("--status-file", status, "--min-np", "1").status_file == status
    hostfile.write_bytes(b"\xef\xbb\xbfa slots=2\r\n")  # of an editor on Windows
    assert parsed("--hostfile", str(hostfile)).hosts == [Host("a", 2)]
    hostfile.write_text("a slots=2\nb slots=two\n")
    message = refused(capsys, "-np", "4", "--hostfile", str(hostfile), "cmd")
    assert f"argument -hostfile/--hostfile: {hostfile}: line 2: 'two' is not" in message
    missing = str(tmp_path / "missing")
    assert f"cannot read {missing!r}" in refused(capsys, "-np", "4", "--hostfile", missing, "cmd")
    message = refused(capsys, "-np", "4", "-i", missing, "cmd")
    assert f"argument -i/--ssh-identity-file: there is no file {missing!r}" in message
    message = refused(capsys, "-np", "4", "--status-file", f"{missing}/x", "cmd")
    assert f"argument --status-file: there is no directory {missing!r}" in message


def test_a_discovery_script_makes_the_job_elastic(script: Path, monkeypatch):
    options = parsed("--host-discovery-script", str(script))
    assert options.elastic
    assert options.hosts == []
    assert options.host_discovery_script == str(script)
    assert (options.min_num_proc, options.max_num_proc) == (4, None)
    assert options.max_worker_failures == 3
    monkeypatch.chdir(script.parent)
    assert parsed("--host-discovery-script", script.name).host_discovery_script == str(script)


def test_a_discovery_script_must_be_executable(script: Path, capsys):
    arguments = ("-np", "2", "--host-discovery-script", str(script), "cmd")
    script.chmod(script.stat().st_mode & ~(stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH))
    message = refused(capsys, *arguments)
    assert f"argument --host-discovery-script: {str(script)!r} is not executable" in message
    script.unlink()
    assert f"there is no program {str(script)!r}" in refused(capsys, *arguments)


def test_a_minimum_makes_the_job_elastic():
    options = parsed("--min-np", "2", "--max-np", "8", "-H", "a:4,b:4")
    assert options.elastic
    assert (options.min_num_proc, options.num_proc, options.max_num_proc) == (2, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--min-np 5", "--min-np 5 is more than -np 4"),
        ("--min-np 4 --max-np 3", "--min-np 4 is more than --max-np 3"),
        ("--min-np 2 --max-np 3", "-np 4 is more than --max-np 3"),
        ("--min-np 0", "argument --min-np/--min-num-proc: must be 1 or more"),
        ("--slots-per-host 0", "argument --slots-per-host: must be 1 or more"),
        ("--reset-limit -1", "argument --reset-limit: must be 0 or more"),
        ("--max-worker-failures 0", "argument --max-worker-failures: must be 1 or more"),
        ("--blacklist-cooldown-range 0 5", "argument --blacklist-cooldown-range: must be 1 or"),
        ("--blacklist-cooldown-range 1 3601", "argument --blacklist-cooldown-range: must be 3600"),
        ("--blacklist-cooldown-range 9 5", "argument --blacklist-cooldown-range: 9 is more than 5"),
        ("-p 0", "argument -p/--ssh-port: must be 1 or more"),
        ("-p 65536", "argument -p/--ssh-port: must be 65535 or less"),
        ("-p ssh", "argument -p/--ssh-port: 'ssh' is not a whole number"),
        ("--output-ranks 4", "argument --output-ranks: there is no rank 4, 3 is last"),
        ("--output-ranks 0,x", "argument --output-ranks: 'x' is not a rank"),
        ("--output-ranks 3-1", "argument --output-ranks: the range '3-1' runs backwards"),
        ("--output-ranks=", "argument --output-ranks: '' is not a rank"),
        ("--network-interfaces eth0,,eth1", "argument --network-interfaces: 'eth0,,eth1' is not"),
        ("--cpu-bind socket", "argument --cpu-bind: invalid choice: 'socket'"),
        ("-H a:1,a:2", "argument -H/--hosts: host 'a' is named twice"),
        ("-H a:4 --hostfile b", "not allowed with argument -H/--hosts"),
        ("-H a:4 --host-discovery-script sh", "not allowed with argument -H/--hosts"),
        ("--gloo --mpi", "not allowed with argument --gloo"),
        ("--mpi --jsrun", "not allowed with argument --mpi"),
        ("--jsrun", "argument --jsrun: this is no LSF job"),
        ("--log-level loud", "argument --log-level: 'loud' is not one of TRACE"),
        ("--timeline-filename=", "argument --timeline-filename: '' is empty"),
        ("--autotune-gaussian-process-noise 1.5", "is above the greatest value 1"),
        ("--thread-affinity 1,", "argument --thread-affinity: '1,' is not of the form CORE"),
        ("--autotune --no-autotune", "not allowed with argument --autotune"),
        ("--log-without-timestamp --no-log-hide-timestamp", "not allowed with argument"),
        ("--fusion-treshold-mb 3", "'--fusion-treshold-mb'; did you mean --fusion-threshold-mb?"),
        ("--no-such-thing=3", "'--no-such-thing'; horovodrun --help-all lists all options"),
    ],
)
def test_mistakes_name_the_option_and_the_reason(arguments: str, why: str, capsys):
    assert why in refused(capsys, "-np", "4", *arguments.split(), "cmd")


@pytest.mark.parametrize("row", [row for row in TUNABLES if row.knob.type in (int, float)])
@pytest.mark.parametrize("value", ["-1", "abc", "nan", "inf", ""])
def test_bad_numbers_name_the_argument(row, value, capsys):
    assert f"argument {row.flag}: " in refused(capsys, "-np", "1", row.flag, value, "cmd")


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5"])
def test_bad_numbers_of_processes(value, capsys):
    assert "argument -np/--num-proc: " in refused(capsys, "-np", value, "cmd")


def test_what_is_missing_is_said_with_an_example(capsys):
    assert "horovodrun -np 2 python train.py" in refused(capsys)
    assert "horovodrun -np 2 python train.py" in refused(capsys, "python", "train.py")
    assert "say what to run" in refused(capsys, "-np", "4")
    assert "say what to run" in refused(capsys, "-np", "4", "--")


def test_a_senseless_variable_is_refused_before_anything_starts(capsys):
    environ = {"HOROVOD_CYCLE_TIME": "fast"}
    assert "HOROVOD_CYCLE_TIME='fast' is not a number" in refused(
        capsys, "-np", "1", "cmd", environ=environ
    )
    assert parsed("--cycle-time-ms", "3", environ=environ).cycle_time_ms == 3


@pytest.mark.parametrize(
    ("arguments", "environ", "notice"),
    [
        ("--disable-cache", {}, "--disable-cache has no effect: nothing is kept between jobs"),
        ("--mpi-threads-disable", {}, "--mpi-threads-disable has no effect: MPI carries nothing"),
        ("--mpi-args=-x", {}, "--mpi-args has no effect without --mpi or --jsrun"),
        ("--binding-args=-x", {}, "--binding-args has no effect without --mpi or --jsrun"),
        ("--torus-allreduce", {}, "--torus-allreduce has no effect: hierarchical allreduce"),
        ("--timeline-mark-cycles", {}, "--timeline-mark-cycles has no effect without --timeline-"),
        ("--autotune-warmup-samples 3", {}, "--autotune-warmup-samples has no effect without --"),
        ("--max-np 4", {}, "--max-np has no effect: this job is not elastic"),
        ("--status-file x", {}, "--status-file has no effect: this job is not elastic"),
        ("--reset-limit 0", {}, "--reset-limit has no effect: this job is not elastic"),
        ("--log-hide-timestamp", {}, "--log-hide-timestamp is deprecated; use --log-without-"),
        ("--no-log-hide-timestamp", {}, "is deprecated; use --log-with-timestamp"),
        ("--min-np 2 --mpi", {}, "--mpi is ignored: the processes of an elastic job come and go"),
        ("--mpi --mpi-threads-disable --mpi-args=-x", {}, None),
        ("--mpi-threads-disable", {"HOROVOD_CPU_OPERATIONS": "MPI"}, None),
        ("--no-mpi-threads-disable --no-torus-allreduce", {}, None),
        ("--timeline-mark-cycles", {"HOROVOD_TIMELINE": "t"}, None),
        ("--min-np 2 --max-np 4 --reset-limit 0 --elastic-timeout 5", {}, None),
        ("--jsrun", {"LSB_JOBID": "1"}, None),
        ("--tcp --gloo --check-nan", {}, None),
    ],
)
def test_what_has_no_effect_is_accepted_and_said(arguments: str, environ, notice: str | None):
    notices = parsed(*arguments.split(), environ=environ).notices
    assert len(notices) == (notice is not None)
    assert not notice or notice in notices[0]


def test_elastic_jobs_are_not_started_by_mpi():
    options = parsed("--min-np", "2", "--mpi")
    assert not options.use_mpi


def test_inside_lsf_hosts_and_their_number_are_known():
    environ = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 4 h2 2"}
    options = parse_args(["cmd"], environ)
    assert options.num_proc == 6
    assert options.hosts == [Host("h1", 4), Host("h2", 2)]
    assert parse_args(["-np", "2", "cmd"], environ).num_proc == 2
    assert parse_args(["-np", "2", "-H", "x:2", "cmd"], environ).hosts == [Host("x", 2)]
