"""Whose memory other tensors share, which can be read without anybody noticing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horovod.torch.optimizers.pending import with_aliases


def test_parameters_by_themselves():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2))
    assert with_aliases(list(model.parameters())) == []


def test_a_step_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        optimizer.step()
    assert with_aliases(list(model.parameters())) == []


ALIASES: dict[str, Callable[[nn.Parameter], Any]] = {
    "detach": lambda param: param.detach(),
    "data": lambda param: param.data,
    "NumPy": lambda param: param.detach().numpy(),
    "a part": lambda param: param[1:],
    "state_dict": lambda param: nn.ParameterList([param]).state_dict(),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_tensors_with_the_same_memory(kind: str):
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    kept = ALIASES[kind](one)
    (found,) = with_aliases([other, one])
    assert found is one
    del kept
    assert with_aliases([other, one]) == []


def test_parameters_of_one_piece_of_memory():
    """As torch lays out those of an LSTM on a device."""
    flat = torch.zeros(8)
    one, other = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    assert len(with_aliases([one, other])) == 2
    del flat
    assert with_aliases([one, other]) == []
    assert len(with_aliases([one])) == 1
