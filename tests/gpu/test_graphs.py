"""Steps in CUDA graphs: replayed they give the same bits as without, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.accelerators import own_device
from tests.docs.pages import blocks
from tests.gpu import JOBS
from tests.gpu.pools import GpuPools

DOCS = Path(__file__).resolve().parents[2] / "docs"
STEPS = 8  # three of them before the capture

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=1e-3, capturable=True),
}


def make_step(
    optimizer: str, device: torch.device, **options: Any
) -> tuple[nn.Module, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """A model, and a step that trains it and returns its loss and the ranks' average of it."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 7)]
    model = nn.Sequential(*layers).to(device)
    wrapped: Any = hvd.DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()), model.named_parameters(), **options
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wrapped.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        wrapped.step()
        loss = loss.detach()
        mean = hvd.allreduce(loss, name="loss")
        total = hvd.allreduce_(mean.double(), op=hvd.Sum, name="total", postscale_factor=0.5)
        return loss, mean + total

    return model, step


def batch(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + hvd.rank())
    inputs = torch.randn(16, 20, generator=generator)
    return inputs.to(device), torch.randint(7, (16,), generator=generator).to(device)


def train_both(optimizer: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Train with and without a graph; the weights, if all that came out was equal."""
    device = own_device()
    plain_model, plain_step = make_step(optimizer, device, **options)
    model, step = make_step(optimizer, device, **options)
    replayed = hvd.graphed(step)
    for number in range(STEPS):
        expected = [value.clone() for value in plain_step(*batch(number, device))]
        found = replayed(*batch(number, device))
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other), (number, one, other)
    for (name, one), other in zip(
        plain_model.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("job", JOBS)
def test_a_replayed_step_is_like_any_other(gpus: GpuPools, job: str, optimizer: str):
    first, *others = gpus.run(job, train_both, optimizer, {})
    for weights in others:
        assert all(map(torch.equal, first, weights))


def test_gradients_in_a_narrower_type(gpus: GpuPools):
    options = {"compression": hvd.Compression.bf16}
    first, second = gpus.run("2 ranks", train_both, "sgd", options)
    assert all(map(torch.equal, first, second))


def capture(what: str) -> str:
    """Capture a step that does something which no graph can hold; what the error says."""
    device = own_device()
    tensor = torch.ones(4, device=device)
    steps: dict[str, Callable[[], Any]] = {
        "gather": lambda: hvd.allgather(tensor, name="rows"),
        "host": lambda: hvd.allreduce(torch.ones(4), name="on the host"),
        "max": lambda: hvd.allreduce(tensor, op=hvd.Max, name="largest"),
    }
    replayed = hvd.graphed(steps[what])
    for _ in range(3):
        replayed()
    with pytest.raises(RuntimeError) as caught:
        replayed()
    assert float(hvd.allreduce(tensor, name="afterwards").sum()) == 4.0
    return str(caught.value)


@pytest.mark.parametrize("what", ["gather", "host", "max"])
def test_what_no_graph_can_hold(gpus: GpuPools, what: str):
    named = {"gather": "allgather 'rows'", "host": "'on the host'", "max": "MAX of torch.float32"}
    for said in gpus.run("2 ranks", capture, what):
        assert named[what] in said
        assert "test_graphs.py:" in said
        assert "cannot be captured" in said


def capture_by_torch() -> str:
    tensor = torch.ones(4, device=own_device())
    hvd.allreduce_(tensor, name="captured")
    hvd.allreduce_(tensor, name="captured")
    with pytest.raises(RuntimeError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        hvd.allreduce_(tensor, name="captured")
    assert float(hvd.allreduce(tensor, name="afterwards").sum()) == 4.0
    return str(caught.value)


def test_torchs_own_capture_is_refused(gpus: GpuPools):
    for said in gpus.run("2 ranks", capture_by_torch):
        assert "use hvd.graphed(step)" in said


def other_arguments() -> list[str]:
    device = own_device()
    _, step = make_step("sgd", device)
    replayed = hvd.graphed(step)
    for number in range(4):
        replayed(*batch(number, device))
    inputs, targets = batch(4, device)
    said = []
    for arguments in [(inputs[:3], targets[:3]), (inputs, 7), (inputs,)]:
        with pytest.raises(ValueError) as caught:
            replayed(*arguments)
        said.append(str(caught.value))
    replayed(inputs, targets)
    return said


def test_arguments_of_another_form(gpus: GpuPools):
    for shape, kind, number in gpus.run("2 ranks", other_arguments):
        assert all(part in shape for part in ("argument 0", "(3, 20)", "(16, 20)"))
        assert "argument 1 must be a tensor" in kind
        assert "same arguments" in number


def start_over() -> None:
    """A job that ends and starts again captures anew."""
    device = own_device()
    _, step = make_step("sgd", device)
    replayed = hvd.graphed(step)
    for number in range(6):
        replayed(*batch(number, device))
    hvd.shutdown()
    hvd.init()
    for number in range(6):
        loss, _ = replayed(*batch(number, device))
    assert torch.isfinite(loss)


def test_after_a_new_start(gpus: GpuPools):
    gpus.run("2 ranks", start_over)


def follow_the_page() -> list[torch.Tensor]:
    namespace: dict[str, Any] = {"__name__": "page"}
    ((code, _),) = blocks(DOCS / "cuda_graphs.md", "python")
    exec(compile(code, "cuda_graphs.md", "exec"), namespace)
    return [param.detach().cpu() for param in namespace["model"].parameters()]


def test_the_page(gpus: GpuPools):
    first, second = gpus.run("2 hosts", follow_the_page)
    assert all(map(torch.equal, first, second))
