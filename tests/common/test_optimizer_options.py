"""The record of arguments that the optimizers of all bindings share, and its checks."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from horovod.common.local_steps import LocalSchedule, OuterSGD
from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Adasum, Average, Sum


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            ({"backward_passes_per_step": passes}, "backward_passes_per_step must be positive, not")
            for passes in (0, -1, 1.5, True, "2", None)
        ),
        *(
            ({"gradient_predivide_factor": factor}, "must be a positive number, not")
            for factor in (0.0, -1.0, float("nan"))
        ),
        *(
            ({"groups": groups}, "groups must be a positive number or a list of lists")
            for groups in (0, -2, True, "all", [1], ("a",))
        ),
        ({"gradient_predivide_factor": 2.0, "op": Sum}, "gradient_predivide_factor needs op=Av"),
        ({"op": Adasum}, "op must be one of Average, Sum, not"),
        ({"op": "sum"}, "op must be one of .*not 'sum'"),
        ({"compression": "fp16"}, "compression must be a compressor"),
        ({"local_steps": 0}, "local_steps must be a number of at least 1"),
        ({"local_steps": 2, "op": Sum}, "leave op at hvd.Average"),
        ({"warmup_steps": 2}, "warmup_steps needs local_steps"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        OptimizerOptions.from_arguments(wrong).checked(Average, Sum)


def test_one_form():
    for passes in (1, 7, np.int64(2)):
        assert OptimizerOptions(backward_passes_per_step=passes).checked() is not None
    checked = OptimizerOptions(op=1, groups=[("a", "b"), ["c"]]).checked()  # type: ignore[arg-type]
    assert checked.op is Sum
    assert checked.groups == [["a", "b"], ["c"]]
    assert OptimizerOptions(groups=3).checked().groups == 3


def test_factors():
    assert OptimizerOptions(gradient_predivide_factor=4.0).predivide_factors == (0.25, 4.0)


def test_divisor():
    for averages, divisor in ((False, 1), (True, 3)):
        options = OptimizerOptions(
            backward_passes_per_step=3, average_aggregated_gradients=averages
        )
        assert options.pass_divisor == divisor


def test_every_argument_arrives():
    among = ProcessSet([0])
    given: dict[str, Any] = {
        **{field.name: object() for field in fields(OptimizerOptions)},
        **{field.name: object() for field in fields(LocalSchedule)},
        "optimizer": object(),
        "num_groups": 0,
        "process_set": among,
        "outer": OuterSGD(),
    }
    del given["schedule"]
    options = OptimizerOptions.from_arguments(given)
    for field in fields(OptimizerOptions):
        if field.name != "schedule":
            assert getattr(options, field.name) is given[field.name]
    for field in fields(LocalSchedule):
        assert getattr(options.schedule, field.name) is given[field.name]


def test_older_form_of_groups():
    def public(num_groups: int = 0, groups: Any = None) -> OptimizerOptions:
        return OptimizerOptions.from_arguments(locals())

    with pytest.warns(DeprecationWarning, match="use groups") as caught:
        assert public(2).groups == 2
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="use groups"):
        assert public(2, [["a"]]).groups == [["a"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert public(0, 3).groups == 3


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (None, [[0, 2, 3]]),
        (2, [[0, 2], [3]]),
        ([["d", "b", "x"], ["c", "d"]], [[3], [2], [0]]),
        ([["a"]], [[0], [2], [3]]),
    ],
)
def test_groups_of_gradients(groups: Any, expected: list[list[int]]):
    options = OptimizerOptions(groups=groups)
    assert options.divide([0, 2, 3], "abcd", ord) == expected
    assert options.divide([], "abcd", ord) == []
