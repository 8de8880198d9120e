"""The configuration file: what it sets, and what it says about mistakes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.options.arguments import parse_args
from horovod.runner.options.config_file import read_config_file, schema
from horovod.runner.options.tunables import (
    TUNABLES,
    chosen_variables,
    settings,
    settings_environment,
)

PAGE = Path(__file__).parents[3] / "docs" / "horovodrun.md"

EVERYTHING = """\
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5.5
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: no
  torus_allreduce: 1
autotune:
  enabled: yes
  log_file: "tune log.csv"
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 40
  gaussian_process_noise: 0.2
timeline:
  filename: /tmp/timeline.json
  mark_cycles: on
dashboard:
  address: 0.0.0.0:9000
  save: page.html
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: 0,1
  gloo_timeout_seconds: 45
logging:
  level: info
  with_timestamp: false
"""


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def test_every_key(config):
    options = parse_args(["-np", "1", "--config-file", config(EVERYTHING), "cmd"], {})
    assert options.use_mpi
    assert settings_environment(options, {}) == {
        "HOROVOD_FUSION_THRESHOLD": "33554432",
        "HOROVOD_CYCLE_TIME": "5.5",
        "HOROVOD_CACHE_CAPACITY": "2048",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        "HOROVOD_TORUS_ALLREDUCE": "1",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "tune log.csv",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "20",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "40",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.2",
        "HOROVOD_TIMELINE": "/tmp/timeline.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_DASHBOARD": "0.0.0.0:9000",
        "HOROVOD_DASHBOARD_SAVE": "page.html",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HOROVOD_MPI_THREADS_DISABLE": "1",
        "HOROVOD_NUM_NCCL_STREAMS": "2",
        "HOROVOD_THREAD_AFFINITY": "0,1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "45",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }


def test_the_file_above_has_every_option_that_has_a_key(config):
    covered = set(read_config_file(config(EVERYTHING)))
    assert covered == {row.dest for row in schema().values() if row} | {"controller"}


@pytest.mark.parametrize("order", [0, 1])
def test_options_beat_the_file_in_any_order_and_the_file_beats_the_environment(config, order):
    path = config("params: {cycle_time_ms: 5, cache_capacity: 5}\nstall_check: {enabled: false}")
    groups = [["--config-file", path], ["--cycle-time-ms", "2", "--stall-check"]]
    ordered = groups[order] + groups[1 - order]
    environ = dict.fromkeys(["HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY"], "9")
    environ["HOROVOD_FUSION_THRESHOLD"] = "9"
    in_force = settings(parse_args(["-np", "1", *ordered, "cmd"], environ), environ)
    assert in_force.cycle_time == 2  # the option
    assert in_force.stall_check_disable is False  # the option
    assert in_force.cache_capacity == 5  # the file
    assert in_force.fusion_threshold == 9  # the environment
    assert in_force.gloo_timeout_seconds == 30  # the default


def test_an_option_for_the_controller_beats_the_file(config):
    path = config("controller: mpi")
    options = parse_args(["-np", "1", "--config-file", path, "--gloo", "cmd"], {})
    assert (options.use_gloo, options.use_mpi) == (True, False)
    options = parse_args(["-np", "1", "--config-file", config("controller: Gloo"), "cmd"], {})
    assert (options.use_gloo, options.use_mpi) == (True, False)


@pytest.mark.parametrize("text", ["", "# nothing\n", "params:\n", "controller:\n"])
def test_empty_means_not_given(config, text: str):
    assert read_config_file(config(text)) == {}


def test_both_senses_of_the_time_in_log_lines(config):
    assert read_config_file(config("logging: {hide_timestamp: true}")) == {
        "log_without_timestamp": True
    }
    assert read_config_file(config("logging: {with_timestamp: true}")) == {
        "log_without_timestamp": False
    }
    with pytest.raises(ValueError, match=r"with_timestamp repeats logging\.hide_timestamp of line"):
        read_config_file(config("logging: {hide_timestamp: true, with_timestamp: false}"))


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("parms:\n  cycle_time_ms: 1", 1, "unknown key 'parms'; did you mean 'params'?"),
        (
            "params:\n  cycle_time_ms: 1\n  fusion_treshold_mb: 3",
            3,
            "unknown key 'params.fusion_treshold_mb'; did you mean 'fusion_threshold_mb'?",
        ),
        ("timeline: {level: INFO}", 1, "did you mean 'logging.level'?"),
        ("cycle_time_ms: 1", 1, "did you mean 'params.cycle_time_ms'?"),
        ("timeline: {zzz: 1}", 1, "known here are filename, mark_cycles"),
        ("params:\n  cycle_time_ms: fast", 2, "params.cycle_time_ms: 'fast' is not a number"),
        ("params:\n  cache_capacity: 1.5", 2, "params.cache_capacity: '1.5' is not a whole number"),
        ("params:\n  cache_capacity: -1", 2, "params.cache_capacity: must be 0 or more"),
        ("params:\n  cache_capacity: true", 2, "params.cache_capacity: 'true' is not a whole"),
        ("params: {hierarchical_allreduce: maybe}", 1, "'maybe' is not a yes or no"),
        ("autotune: {gaussian_process_noise: 2}", 1, "above the greatest value 1"),
        ("library_options: {num_nccl_streams: 0}", 1, "below the least allowed value 1"),
        ("library_options: {thread_affinity: a}", 1, "not of the form CORE[,CORE...]"),
        ("logging:\n\n  level: loud", 3, "'loud' is not one of TRACE"),
        ("controller: jsrun", 1, "controller: 'jsrun' is not one of gloo, mpi"),
        ("timeline:\n  filename: [a, b]", 2, "timeline.filename: must be a single value"),
        ("params: 7", 1, "params must hold lines of the form 'key: value'"),
        ("- a", 1, "the file must hold lines of the form 'key: value'"),
        ("params:\n  cache_capacity: 1\n  cache_capacity: 2", 3, "repeats params.cache_capacity"),
        ("params:\n  a: 'b\n", 3, "unexpected end of stream"),
    ],
)
def test_mistakes_name_file_line_and_reason(config, capsys, text: str, line: int, why: str):
    path = config(text)
    with pytest.raises(SystemExit) as exit_info:
        parse_args(["-np", "1", "--config-file", path, "cmd"], {})
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert f"argument --config-file: {path}, line {line}: " in message
    assert why in message


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot read .*No such file"):
        read_config_file(str(tmp_path / "missing.yaml"))
    with pytest.raises(ValueError, match=r"cannot read .*directory"):
        read_config_file(str(tmp_path))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        read_config_file(str(binary))
    binary.write_bytes(b"params: \x07")
    with pytest.raises(ValueError, match="is not YAML"):
        read_config_file(str(binary))


@given(st.text(alphabet="ab:{}[]-# \n'\"&*!|>%@", max_size=30))
def test_any_text_is_values_or_a_value_error(tmp_path_factory, text: str):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    values, complaint = {}, str(path)
    try:
        values = read_config_file(str(path))
    except ValueError as error:
        complaint = str(error)
    assert str(path) in complaint
    assert values == {}  # no key can be spelt with these letters


def test_the_example_in_the_documentation_sets_every_default(config):
    example = PAGE.read_text().partition("begin configuration -->\n")[2]
    path = config(textwrap.dedent(example.partition("<!-- end")[0]))
    options = parse_args(["-np", "1", "--config-file", path, "cmd"], {})
    assert options.notices == []
    env = chosen_variables(options)
    keyed = {row for row in schema().values() if row and row.knob.default is not None}
    assert set(env) == {row.env for row in keyed}
    knobs = {row.env: row.knob for row in TUNABLES}
    assert all(knobs[name].parse(text) == knobs[name].default for name, text in env.items())
