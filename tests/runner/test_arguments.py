"""The command line: what it means, and what it says about mistakes."""

from __future__ import annotations

import pytest

from horovod.common.config import Config
from horovod.runner.arguments import make_parser, parse_args
from horovod.runner.tunables import TUNABLES, chosen, without_effect


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_args(arguments)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


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


OPTIONS = [
    (["--fusion-threshold-mb", "32"], "fusion_threshold", 32 << 20, "33554432"),
    (["--fusion-threshold-mb", "0"], "fusion_threshold", 0, "0"),
    (["--cycle-time-ms", "20"], "cycle_time", 20.0, "20.0"),
    (["--cache-capacity", "7"], "cache_capacity", 7, "7"),
    (["--hierarchical-allreduce"], "hierarchical_allreduce", True, "1"),
    (["--no-hierarchical-allreduce"], "hierarchical_allreduce", False, "0"),
    (["--hierarchical-allgather"], "hierarchical_allgather", True, "1"),
    (["--no-hierarchical-allgather"], "hierarchical_allgather", False, "0"),
    (["--timeline-filename", "/tmp/t.json"], "timeline", "/tmp/t.json", "/tmp/t.json"),
    (["--timeline-mark-cycles"], "timeline_mark_cycles", True, "1"),
    (["--no-stall-check"], "stall_check_disable", True, "1"),
    (["--stall-check"], "stall_check_disable", False, "0"),
    (["--stall-check-warning-time-seconds", "5"], "stall_check_time_seconds", 5.0, "5"),
    (["--stall-check-shutdown-time-seconds", "90"], "stall_shutdown_time_seconds", 90.0, "90"),
    (["--start-timeout", "12"], "start_timeout", 12.0, "12"),
    (["--gloo-timeout-seconds", "2.5"], "gloo_timeout_seconds", 2.5, "2.5"),
    (["--log-level", "debug"], "log_level", "debug", "DEBUG"),
    (["--log-without-timestamp"], "log_hide_time", True, "1"),
    (["--log-with-timestamp"], "log_hide_time", False, "0"),
]


@pytest.mark.parametrize(("arguments", "field", "value", "text"), OPTIONS)
def test_options_reach_the_core(arguments: list[str], field: str, value: object, text: str):
    env = chosen(parse_args(["-np", "1", *arguments, "cmd"]))
    assert env == {f"HOROVOD_{field.upper()}": text}
    assert getattr(Config.from_env(env), field) == value


def test_every_row_of_the_table_is_covered_above():
    covered = {f"HOROVOD_{field.upper()}" for _, field, _, _ in OPTIONS}
    assert covered == {row.env for row in TUNABLES}


def test_options_that_are_not_given_set_nothing():
    assert chosen(parse_args(["-np", "1", "cmd"])) == {}


def test_marking_cycles_needs_a_timeline():
    mark = {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    (complaint,) = without_effect(mark, {}).values()
    assert "--timeline-mark-cycles has no effect without --timeline-filename" in complaint
    assert not without_effect(mark, {"HOROVOD_TIMELINE": "DYNAMIC"})
    assert not without_effect({**mark, "HOROVOD_TIMELINE": "t.json"}, {})


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


def test_other_mistakes(capsys):
    assert "not one of TRACE" in refused(capsys, "-np", "1", "--log-level", "loud", "cmd")
    assert "not allowed with" in refused(
        capsys, "-np", "1", "--hierarchical-allreduce", "--no-hierarchical-allreduce", "cmd"
    )
    assert "--no-such-option" in refused(capsys, "-np", "1", "--no-such-option")


@pytest.mark.parametrize("hosts", ["localhost", "localhost:4", "127.0.0.1:2"])
def test_this_machine_as_host(hosts: str):
    assert parse_args(["-np", "2", "-H", hosts, "cmd"]).hosts[0].name == hosts.partition(":")[0]


def test_another_host_is_refused_with_a_way_out(capsys):
    message = refused(capsys, "-np", "4", "-H", "localhost:2,far.example:2", "cmd")
    assert "'far.example'" in message
    assert "not available in this version" in message
    assert "mpirun" in message
    assert "torchrun" in message
    assert "name it once" in refused(capsys, "-np", "2", "-H", "localhost:1,127.0.0.1:1", "cmd")


def test_help_is_grouped_and_teaches():
    text = make_parser().format_help()
    for section in ("job:", "output:", "tuning:", "stall check:", "logging:", "examples:"):
        assert f"\n{section}" in text
    assert all(row.flag in text for row in TUNABLES)
    assert "--log-with-timestamp" not in text
    assert "horovodrun -np 2 python train.py" in text
