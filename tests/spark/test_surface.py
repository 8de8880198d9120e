"""The names and arguments that programs written for upstream Horovod use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import horovod.spark
import horovod.spark.runner

RUN = {
    "fn": inspect.Parameter.empty,
    "args": (),
    "kwargs": None,
    "num_proc": None,
    "start_timeout": None,
    "use_mpi": None,
    "use_gloo": None,
    "extra_mpi_args": None,
    "env": None,
    "stdout": None,
    "stderr": None,
    "verbose": 1,
    "nics": None,
    "prefix_output_with_timestamp": False,
    "executable": None,
    "resource_profile": None,  # ours, after upstream's
}
RUN_ELASTIC = {
    "fn": inspect.Parameter.empty,
    "args": (),
    "kwargs": None,
    "num_proc": None,
    "min_num_proc": None,
    "max_num_proc": None,
    "start_timeout": None,
    "elastic_timeout": None,
    "reset_limit": None,
    "env": None,
    "stdout": None,
    "stderr": None,
    "verbose": 1,
    "nics": None,
    "prefix_output_with_timestamp": False,
    "min_np": None,
    "max_np": None,
    "resource_profile": None,  # ours, after upstream's
}


def arguments(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters
    return [(name, parameter.default) for name, parameter in parameters.items()]


def test_arguments_in_their_order():
    assert arguments(horovod.spark.run) == list(RUN.items())
    assert arguments(horovod.spark.run_elastic) == list(RUN_ELASTIC.items())


def test_names():
    assert horovod.spark.runner.run is horovod.spark.run
    assert {"run", "run_elastic"} <= set(horovod.spark.__all__)
