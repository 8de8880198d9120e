"""The table of knobs, and the page made from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.common.config import ELASTIC, KNOBS, Config, Knob
from horovod.common.knobs_page import knobs_page

PAGE = Path(__file__).parents[2] / "docs" / "knobs.md"


def test_defaults() -> None:
    assert Config.from_env({}) == Config()
    assert Config.from_env({knob.env: " " for knob in KNOBS}) == Config()
    config = Config()
    assert config.fusion_threshold == 128 * 1024 * 1024
    assert config.cycle_time == 1.0
    assert config.cache_capacity == 1024
    assert config.hierarchical_allreduce is None
    assert config.gloo_timeout_seconds == 30
    assert config.stall_check_time_seconds == 60
    assert config.start_timeout == 30


def test_every_variable_reaches_its_field() -> None:
    samples = {bool: True, int: 7, float: 61.5, str: "text"}
    wanted = {
        knob: knob.choices[0] if knob.choices else knob.maximum or samples[knob.type]
        for knob in KNOBS
    }
    environ = {knob.env: str(value) for knob, value in wanted.items()}
    config = Config.from_env(environ)
    for knob, value in wanted.items():
        assert getattr(config, knob.name) == value, knob.env


def test_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().cycle_time = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("text", ["1", "2", "true", "True", "YES", "on"])
def test_yes(text: str) -> None:
    assert Config.from_env({"HOROVOD_ELASTIC": text}).elastic is True


@pytest.mark.parametrize("text", ["0", "-1", "false", "No", "off"])
def test_no(text: str) -> None:
    assert Config.from_env({"HOROVOD_HIERARCHICAL_ALLREDUCE": text}).hierarchical_allreduce is False


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB"),
        ("HOROVOD_FUSION_THRESHOLD", "-1"),
        ("HOROVOD_CYCLE_TIME", "fast"),
        ("HOROVOD_CYCLE_TIME", "nan"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "0"),
        ("HOROVOD_START_TIMEOUT", "inf"),
        ("HOROVOD_ELASTIC", "maybe"),
        ("HOROVOD_CPU_OPERATIONS", "nccl"),
        ("HOROVOD_CONTROLLER", "smoke-signals"),
        ("HOROVOD_NUM_NCCL_STREAMS", "0"),
        ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "1.5"),
    ],
)
def test_senseless_value_is_an_error_naming_the_variable(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        Config.from_env({name: text})
    assert text in str(caught.value)


@given(st.sampled_from([knob for knob in KNOBS if knob.type is not str]), st.text(max_size=10))
def test_any_text_gives_a_value_in_range_or_a_value_error(knob: Knob, text: str) -> None:
    value = message = None
    try:
        value = getattr(Config.from_env({knob.env: text}), knob.name)
    except ValueError as error:
        message = str(error)
    assert message is None or knob.env in message
    assert value is None or isinstance(value, knob.type)
    assert value is None or knob.minimum is None or value >= knob.minimum
    assert value is None or knob.maximum is None or value <= knob.maximum


def test_choices_ignore_case() -> None:
    assert Config.from_env({"HOROVOD_CPU_OPERATIONS": "MPI"}).cpu_operations == "mpi"
    assert Config.from_env({"HOROVOD_CONTROLLER": "Gloo"}).controller == "gloo"
    assert Config.from_env({"HOROVOD_LOG_LEVEL": "TRACE"}).log_level == "trace"


def test_unknown_log_level_means_warning() -> None:
    assert Config.from_env({"HOROVOD_LOG_LEVEL": "loud"}).log_level == "warning"


def test_ccl_means_gloo() -> None:
    assert Config.from_env({"HOROVOD_CPU_OPERATIONS": "CCL"}).cpu_operations == "gloo"


def test_shutdown_before_the_stall_report_is_ignored() -> None:
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    assert Config.from_env(environ).stall_shutdown_time_seconds == 0
    environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "4"
    assert Config.from_env(environ).stall_shutdown_time_seconds == 5


def test_page_is_current() -> None:
    command = "python -m horovod.common.knobs_page > docs/knobs.md"
    assert PAGE.read_text() == knobs_page(), f"run: {command}"


def test_page_names_every_knob() -> None:
    page = knobs_page()
    for knob in KNOBS:
        assert f"`{knob.env}`" in page
        assert knob.help.endswith(".")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("no", False), (" ", False)])
def test_one_knob_is_read_without_the_others(text: str, value: bool):
    environ = {"HOROVOD_ELASTIC": text, "HOROVOD_CYCLE_TIME": "nonsense"}
    assert ELASTIC.read(environ) is value
    assert ELASTIC.read({}) is False
