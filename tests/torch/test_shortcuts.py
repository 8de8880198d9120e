"""Operators skip torch's dispatcher only where nobody could tell."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from horovod.torch.ops.shortcuts import shorten

LIBRARY = torch.library.Library("horovod_shortcuts", "DEF")
LIBRARY.define("double_(Tensor(a!)[] tensors) -> ()")
calls: list[str] = []


def kernel(tensors: list[torch.Tensor]) -> None:
    calls.append("kernel")
    tensors[0].mul_(2)


def repeat(tensors: list[torch.Tensor]) -> bool:
    calls.append("repeat")
    if tensors[0].numel() > 3:
        return False
    tensors[0].mul_(2)
    return True


operator = torch.ops.horovod_shortcuts.double_.default
shorten(operator, repeat)
LIBRARY.impl("double_", kernel, "CompositeExplicitAutograd")
torch.library.register_fake("horovod_shortcuts::double_", lambda tensors: None, lib=LIBRARY)


@pytest.fixture(autouse=True)
def forget():
    calls.clear()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        calls.append(str(function))
        return function(*arguments, **(named or {}))


class Hearing(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), named=None):
        calls.append("heard")
        return function(*arguments, **(named or {}))


class Special(torch.Tensor):
    pass


def test_an_ordinary_tensor_takes_the_short_way():
    tensor = torch.ones(3)
    operator([tensor])
    torch.ops.horovod_shortcuts.double_([tensor])  # this form goes through the dispatcher
    assert calls == ["repeat", "kernel"]
    assert tensor.tolist() == [4, 4, 4]


def test_the_kernel_runs_where_the_short_way_is_refused():
    tensor = torch.ones(4)
    operator([tensor])
    assert calls == ["repeat", "kernel"]
    assert tensor.tolist() == [2, 2, 2, 2]


def test_compiled_code_takes_the_short_way():
    def double_twice(tensor: torch.Tensor) -> torch.Tensor:
        torch.ops.horovod_shortcuts.double_([tensor])
        torch.ops.horovod_shortcuts.double_([tensor])
        return tensor

    compiled = torch.compile(double_twice, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [4, 4, 4]
    assert calls == ["repeat", "repeat"]


def test_modes_see_every_call():
    tensor = torch.ones(3)
    with Watching():
        operator([tensor])
    assert calls[0] == "horovod_shortcuts.double_.default"
    assert "repeat" not in calls[:1]
    calls.clear()
    with Hearing():
        operator([tensor])
    assert calls[0] == "heard"
    assert tensor.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(3).as_subclass(Special)],
        [torch.ones(3), torch.ones(3)],
    ],
    ids=["subclass", "several"],
)
def test_other_tensors_take_the_long_way(tensors: list[torch.Tensor]):
    operator(tensors)
    assert calls == ["kernel"]


def test_functionalisation_is_asked():
    with pytest.raises(RuntimeError, match="functionalizing"):
        operator([torch._to_functional_tensor(torch.ones(3))])
    assert calls == []


def test_a_tensor_that_needs_a_gradient_takes_the_long_way():
    tensor = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        operator([tensor])
    assert calls == ["kernel"]


def test_nothing_happens_to_fake_tensors():
    with FakeTensorMode() as mode:
        operator([mode.from_tensor(torch.ones(3))])
    assert calls == []


def test_transforms_take_the_long_way():
    tensor = torch.ones(3)

    def doubled(scale: torch.Tensor) -> torch.Tensor:
        operator([tensor])
        return (scale * tensor).sum()

    assert torch.func.grad(doubled)(torch.ones(3)).tolist() == [2, 2, 2]
    assert calls == ["kernel"]
