"""The checks that the optimizers of several bindings share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod.common.optimizer_arguments import check_groups, check_passes, predivide_factors
from horovod.common.reduce_op import Average, Sum


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, "2", None])
def test_wrong_numbers_of_passes(passes: Any):
    with pytest.raises(ValueError, match="backward_passes_per_step must be positive, not"):
        check_passes(passes)


def test_numbers_of_passes():
    for passes in (1, 7, np.int64(2)):
        check_passes(passes)


def test_factors():
    assert predivide_factors(4.0, Average) == (0.25, 4.0)
    assert predivide_factors(1.0, Sum) == (1.0, 1.0)
    with pytest.raises(ValueError, match="gradient_predivide_factor needs op=Average"):
        predivide_factors(2.0, Sum)
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be a positive number, not"):
            predivide_factors(factor, Average)


def test_groups():
    assert check_groups(None) is None
    assert check_groups(3) == 3
    assert check_groups([("a", "b"), ["c"]]) == [["a", "b"], ["c"]]
    for groups in (0, -2, True, "all", [1], ("a",)):
        with pytest.raises(ValueError, match="groups must be a positive number or a list of lists"):
            check_groups(groups)
