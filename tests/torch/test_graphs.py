"""hvd.graphed and what captures it, as far as no GPU is needed: the rest is in tests/gpu."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd
from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.execution.capture import GraphCapture, cannot_capture, is_on, shown_to
from horovod.engine.request import Request
from horovod.torch.graphs import GraphedStep


def request(kind: Kind = Kind.ALLREDUCE, op: ReduceOp = ReduceOp.SUM) -> Request:
    tensors = [torch.ones(3)]
    collective = Collective(kind, "loss", reduction=Reduction(op))
    return Request(None, collective, f"{kind.value}.loss", b"", tensors, tensors)


def capture() -> GraphCapture:
    return GraphCapture(lambda set_id: None)


def test_too_few_steps_before_the_capture():
    with pytest.raises(ValueError, match="at least 2 steps, got 1"):
        hvd.graphed(lambda: None, warmup=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_device():
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        hvd.graphed(lambda: None)()


@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST])
def test_what_cannot_be_captured_names_the_line(kind: Kind):
    with shown_to(capture(), is_on=True) as _, pytest.raises(RuntimeError) as caught:
        capture().take(request(kind), set_id=0, size=2)
    said = str(caught.value)
    assert said.startswith(f"{kind.value} 'loss'")
    assert "test_graphs.py:" in said
    assert "cannot be captured" in said
    if kind is Kind.ALLREDUCE:
        assert "SUM of torch.float32 on cpu" in said


def test_only_one_step_is_captured_at_a_time():
    with shown_to(capture(), is_on=True):
        assert is_on()
        with (
            pytest.raises(RuntimeError, match="may not call another one"),
            shown_to(capture(), True),
        ):
            pass
        assert is_on()
    assert not is_on()


def test_nothing_goes_to_the_other_ranks_from_a_captured_step():
    hvd.init()
    try:
        with shown_to(capture(), is_on=True):
            with pytest.raises(RuntimeError, match=r"'loss'.*cannot be captured"):
                hvd.allreduce(torch.ones(2), name="loss")
            with pytest.raises(RuntimeError, match="barrier"):
                hvd.barrier()
        assert float(hvd.allreduce(torch.ones(1), name="afterwards")) == 1.0
    finally:
        hvd.shutdown()


def filled(captured: list[object], passed: list[object]) -> None:
    """Pass other arguments to a step that was captured with these."""
    step = GraphedStep(lambda: None, warmup=2)
    step._inputs, step._form = captured, "form"
    step._fill(passed, "form")


def test_arguments_go_where_the_graph_reads():
    target = torch.zeros(2)
    filled([target, "mean"], [torch.ones(2), "mean"])
    assert target.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        ([torch.ones(3), "mean"], r"argument 0 is torch.float32 of shape \(3,\).*\(2,\)"),
        ([torch.ones(2, dtype=torch.int64), "mean"], "argument 0 is torch.int64"),
        ([3, "mean"], "argument 0 must be a tensor"),
        ([torch.ones(2), "sum"], "argument 1 was 'mean'.*is 'sum' now"),
    ],
)
def test_arguments_that_differ(passed: list[object], said: str):
    with pytest.raises(ValueError, match=said):
        filled([torch.zeros(2), "mean"], passed)


def test_arguments_of_another_tree():
    step = GraphedStep(lambda: None, warmup=2)
    step._inputs, step._form = [], "one form"
    with pytest.raises(ValueError, match="same arguments"):
        step._fill([], "another form")


def test_the_name_says_which_step_it_is():
    def train() -> None: ...

    assert hvd.graphed(train).__name__ == "train"
    assert cannot_capture(request()).args
