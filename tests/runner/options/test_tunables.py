"""The table of options that set variables of the core."""

from __future__ import annotations

import pytest

from horovod.common.config import Config
from horovod.runner.options.arguments import parse_args
from horovod.runner.options.tunables import (
    TUNABLES,
    chosen_variables,
    help_text,
    ineffective_variables,
    settings,
    settings_environment,
)

OPTIONS = [
    (["--fusion-threshold-mb", "32"], "fusion_threshold", 32 << 20, "33554432"),
    (["--fusion-threshold-mb", "0"], "fusion_threshold", 0, "0"),
    (["--cycle-time-ms", "20"], "cycle_time", 20.0, "20.0"),
    (["--cache-capacity", "7"], "cache_capacity", 7, "7"),
    (["--hierarchical-allreduce"], "hierarchical_allreduce", True, "1"),
    (["--no-hierarchical-allreduce"], "hierarchical_allreduce", False, "0"),
    (["--hierarchical-allgather"], "hierarchical_allgather", True, "1"),
    (["--no-hierarchical-allgather"], "hierarchical_allgather", False, "0"),
    (["--torus-allreduce"], "torus_allreduce", True, "1"),
    (["--no-torus-allreduce"], "torus_allreduce", False, "0"),
    (["--autotune"], "autotune", True, "1"),
    (["--no-autotune"], "autotune", False, "0"),
    (["--autotune-log-file", "a.csv"], "autotune_log", "a.csv", "a.csv"),
    (["--autotune-warmup-samples", "4"], "autotune_warmup_samples", 4, "4"),
    (["--autotune-steps-per-sample", "5"], "autotune_steps_per_sample", 5, "5"),
    (["--autotune-bayes-opt-max-samples", "6"], "autotune_bayes_opt_max_samples", 6, "6"),
    (["--autotune-gaussian-process-noise", "0.5"], "autotune_gaussian_process_noise", 0.5, "0.5"),
    (["--timeline-filename", "/tmp/t.json"], "timeline", "/tmp/t.json", "/tmp/t.json"),
    (["--timeline-mark-cycles"], "timeline_mark_cycles", True, "1"),
    (["--no-timeline-mark-cycles"], "timeline_mark_cycles", False, "0"),
    (["--dashboard"], "dashboard", "on", "on"),
    (["--dashboard", "127.0.0.1:9000"], "dashboard", "127.0.0.1:9000", "127.0.0.1:9000"),
    (["--dashboard=:9000"], "dashboard", ":9000", ":9000"),
    (["--dashboard", "off"], "dashboard", "off", "off"),
    (["--dashboard-save", "a.html"], "dashboard_save", "a.html", "a.html"),
    (["--no-stall-check"], "stall_check_disable", True, "1"),
    (["--stall-check"], "stall_check_disable", False, "0"),
    (["--stall-check-warning-time-seconds", "5"], "stall_check_time_seconds", 5.0, "5"),
    (["--stall-check-shutdown-time-seconds", "90"], "stall_shutdown_time_seconds", 90.0, "90"),
    (["--check-nan"], "check_nan", True, "1"),
    (["--start-timeout", "12"], "start_timeout", 12.0, "12"),
    (["--gloo-timeout-seconds", "2.5"], "gloo_timeout_seconds", 2.5, "2.5"),
    (["--elastic-timeout", "60"], "elastic_timeout", 60.0, "60"),
    (["--mpi-threads-disable"], "mpi_threads_disable", True, "1"),
    (["--no-mpi-threads-disable"], "mpi_threads_disable", False, "0"),
    (["--num-nccl-streams", "2"], "num_nccl_streams", 2, "2"),
    (["--thread-affinity", "3"], "thread_affinity", "3", "3"),
    (["--thread-affinity", "0,2"], "thread_affinity", "0,2", "0,2"),
    (["--log-level", "debug"], "log_level", "debug", "DEBUG"),
    (["--log-without-timestamp"], "log_hide_time", True, "1"),
    (["--log-with-timestamp"], "log_hide_time", False, "0"),
    (["--log-hide-timestamp"], "log_hide_time", True, "1"),
    (["--no-log-hide-timestamp"], "log_hide_time", False, "0"),
]


@pytest.mark.parametrize(("arguments", "field", "value", "text"), OPTIONS)
def test_options_reach_the_core(arguments: list[str], field: str, value: object, text: str):
    env = chosen_variables(parse_args(["-np", "1", *arguments, "cmd"], {}))
    assert env == {f"HOROVOD_{field.upper()}": text}
    assert getattr(Config.from_env(env), field) == value


def test_every_row_of_the_table_is_covered_above():
    covered = {f"HOROVOD_{field.upper()}" for _, field, _, _ in OPTIONS}
    assert covered == {row.env for row in TUNABLES}


def test_options_that_are_not_given_set_nothing():
    assert settings_environment(parse_args(["-np", "1", "cmd"], {}), {}) == {}


def test_options_beat_the_environment_and_leave_the_rest_of_it():
    environ = {"HOROVOD_CYCLE_TIME": "3", "HOROVOD_START_TIMEOUT": "7"}
    options = parse_args(["-np", "1", "--cycle-time-ms", "2", "cmd"], environ)
    assert settings_environment(options, environ) == {"HOROVOD_CYCLE_TIME": "2.0"}
    in_force = settings(options, environ)
    assert (in_force.cycle_time, in_force.start_timeout, in_force.cache_capacity) == (2.0, 7, 1024)


def test_tcp_keeps_nccl_off_infiniband():
    options = parse_args(["-np", "1", "--tcp", "cmd"], {})
    assert settings_environment(options, {}) == {"NCCL_IB_DISABLE": "1"}


def test_marking_cycles_needs_a_timeline():
    mark = {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    (complaint,) = ineffective_variables(mark, {}).values()
    assert "--timeline-mark-cycles has no effect without --timeline-filename" in complaint
    assert not ineffective_variables(mark, {"HOROVOD_TIMELINE": "DYNAMIC"})
    assert not ineffective_variables({**mark, "HOROVOD_TIMELINE": "t.json"}, {})


def test_autotuning_options_are_exported_only_with_autotuning():
    row = ["--autotune-warmup-samples", "4"]
    warmup = {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "4"}
    alone = parse_args(["-np", "1", *row, "cmd"], {})
    assert settings_environment(alone, {}) == {}
    assert settings_environment(alone, {"HOROVOD_AUTOTUNE": "0"}) == {}
    assert settings_environment(alone, {"HOROVOD_AUTOTUNE": "1"}) == warmup
    on = parse_args(["-np", "1", "--autotune", *row, "cmd"], {})
    assert settings_environment(on, {}) == {"HOROVOD_AUTOTUNE": "1", **warmup}
    off = parse_args(["-np", "1", "--no-autotune", *row, "cmd"], {})
    assert settings_environment(off, {"HOROVOD_AUTOTUNE": "1"}) == {"HOROVOD_AUTOTUNE": "0"}


@pytest.mark.parametrize("row", TUNABLES, ids=lambda row: row.flag)
def test_help_states_the_default_of_every_value(row):
    assert row.opposite or "(default: " in help_text(row)
    # A default that a row words itself is the knob's.
    if row.help and row.knob.type in (int, float):
        rendered = help_text(row).partition("(default: ")[2].partition(")")[0]
        assert row.knob.parse(row.render(row.parse(rendered))) == row.knob.default
