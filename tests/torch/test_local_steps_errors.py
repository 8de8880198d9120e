"""What DistributedOptimizer(local_steps=...) refuses, on all ranks and before anything is sent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"local_steps": 0}, "local_steps must be a number of at least 1, not 0"),
    ({"local_steps": -3}, "local_steps must be"),
    ({"local_steps": 1.5}, "local_steps must be"),
    ({"local_steps": True}, "local_steps must be"),
    ({"outer": hvd.OuterSGD()}, "outer needs local_steps"),
    ({"warmup_steps": 3}, "warmup_steps needs local_steps"),
    ({"delay": 3}, "delay needs local_steps"),
    ({"local_steps": 2, "warmup_steps": -1}, "warmup_steps must be"),
    ({"local_steps": 8, "fragments": 0}, "fragments must be"),
    ({"local_steps": 8, "fragments": 3}, "number of layers, 2, and is 3"),
    ({"local_steps": 1, "fragments": 2}, "must not exceed local_steps=1"),
    ({"local_steps": 4, "delay": 4}, "delay=4 must be less than local_steps=4"),
    ({"local_steps": 4, "delay": 1, "alpha": 1.5}, "alpha must be"),
    ({"local_steps": 4, "alpha": 0.5}, "alpha needs delay"),
    ({"local_steps": 4, "outer": torch.optim.SGD}, "outer must be a hvd.OuterSGD"),
    ({"local_steps": 4, "outer": hvd.OuterSGD(lr=0)}, "lr of hvd.OuterSGD"),
    ({"local_steps": 4, "outer": hvd.OuterSGD(momentum=1)}, "momentum of hvd.OuterSGD"),
    ({"local_steps": 4, "average_buffers": True}, "average_buffers must be the model"),
    ({"local_steps": 4, "within": [0]}, "within must be the hvd.ProcessSet"),
    ({"local_steps": 4, "within": hvd.ProcessSet([0, 1])}, "registered"),
    ({"local_steps": 4, "shard_state": True}, "does not go with shard_state"),
    ({"local_steps": 4, "op": hvd.Adasum}, "leave op at hvd.Average"),
    ({"local_steps": 4, "op": hvd.Sum}, "leave op at hvd.Average"),
    (
        {"local_steps": 4, "warmup_steps": 1, "communication_hook": hvd.hooks.EightBit()},
        "either gradients or what local steps exchange",
    ),
]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _made(options: dict[str, Any]) -> Any:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.get("overlap_forward"):
        options = {**options, "overlap_forward": model}
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def _errors(cases: list[dict[str, Any]]) -> list[str]:
    told = []
    for options in cases:
        with pytest.raises(ValueError) as caught:
            _made(options)
        told.append(str(caught.value))
    return told


def test_wrong_arguments(pool2: RankPool):
    cases = [*WRONG, ({"local_steps": 4, "overlap_forward": True}, "overlap_forward")]
    for told in pool2.run(_errors, [options for options, _ in cases]):
        for text, (options, pattern) in zip(told, cases, strict=True):
            assert re.search(pattern, text), (options, text)


def _differing() -> list[str]:
    told = []
    for options in (
        {"local_steps": 4 + hvd.rank()},
        {"local_steps": 4, "outer": hvd.OuterSGD(momentum=0.5 + hvd.rank() / 4)},
        {"local_steps": 4, "delay": hvd.rank()},
        {"local_steps": 4} if hvd.rank() else {},
    ):
        with pytest.raises(ValueError) as caught:
            _made(options)
        told.append(str(caught.value))
    return told


def test_ranks_that_differ_are_told_who_has_what(pool2: RankPool):
    for steps, outer, delay, missing in pool2.run(_differing):
        assert "local_steps of DistributedOptimizer differs between ranks 0 and 1: 4 and 5" in steps
        assert "momentum=0.5" in outer
        assert "momentum=0.75" in outer
        assert "delay of DistributedOptimizer differs between ranks 0 and 1: 0 and 1" in delay
        assert "None and 4" in missing


def _uneven() -> str:
    """Rank 1 has fewer batches, and joins."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), local_steps=3
    )
    with pytest.raises(hvd.HorovodInternalError) as caught:  # noqa: PT012
        for _ in range(3 - hvd.rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        hvd.join()
    return str(caught.value)


def test_a_rank_that_has_joined_is_missed(pool2: RankPool):
    for told in pool2.run(_uneven):
        assert "equally many steps" in told


def _loaded_wrongly() -> str:
    state = _made({"local_steps": 4, "fragments": 2}).state_dict()
    with pytest.raises(ValueError) as caught:
        _made({"local_steps": 4}).load_state_dict(state)
    return str(caught.value)


def test_a_state_of_other_fragments_is_refused(pool2: RankPool):
    for told in pool2.run(_loaded_wrongly):
        assert "fragments=2" in told
        assert "fragments=1" in told
