"""The communication hooks by themselves: what they make of buckets of gradients."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from horovod.engine.collective import Reduction
from horovod.torch import hooks
from horovod.torch.hooks.compressing import (
    CompressingHook,
    allgather_traffic,
    allreduce_traffic,
)
from horovod.torch.hooks.eightbit import BLOCK
from tests.effort import examples
from tests.ranks import RankPool

Tensor = torch.Tensor

HOOKS: dict[str, Callable[[], CompressingHook]] = {
    "FP16": hooks.FP16,
    "BF16": hooks.BF16,
    "PowerSGD 1": hooks.PowerSGD,
    "PowerSGD 3": lambda: hooks.PowerSGD(3),
    "PowerSGD late": lambda: hooks.PowerSGD(2, start_iteration=2),
    "TopK": hooks.TopK,
    "TopK 0.2": lambda: hooks.TopK(0.2),
    "TopK 1": lambda: hooks.TopK(1),
    "EightBit": hooks.EightBit,
}
FEEDBACK = [name for name in HOOKS if name not in ("FP16", "BF16")]
SHAPES = [(), (0, 3), (1,), (7,), (70,), (600,), (3, 4), (16, 20), (40, 13, 3), (5, 300)]
# The relative error of rounding.
PRECISION = {
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
    torch.float32: 2**-24,
    torch.float64: 2**-53,
    torch.complex64: 2**-23,
}
FLOATING = [dtype for dtype in PRECISION if dtype.is_floating_point]
OPS = st.sampled_from([hvd.Average, hvd.Sum])
STEPS = 4


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradients, different on all ranks and in all steps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    exponent: int
    seed: int

    def of(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 16 + rank) * 16 + step)
        values = torch.randn(math.prod(self.shape), generator=generator, dtype=torch.float64)
        return (values * 2.0**self.exponent).to(self.dtype)


def gradients(dtypes: Sequence[torch.dtype] = tuple(PRECISION)) -> st.SearchStrategy[Gradient]:
    return st.builds(
        Gradient,
        st.sampled_from(SHAPES),
        st.sampled_from(dtypes),
        st.integers(-6, 6),
        st.integers(0, 10_000),
    )


class Counted(hooks.GradientBucket):
    """Also counts what a rank has to send."""

    traffic = 0.0

    def allreduce(self, tensors: Sequence[Tensor], label: str = "") -> Any:
        self.traffic += sum(allreduce_traffic(t.nbytes, self.num_ranks) for t in tensors)
        return super().allreduce(tensors, label)

    def allgather(self, tensors: Sequence[Tensor], label: str = "") -> Any:
        self.traffic += sum(allgather_traffic(t.nbytes, self.num_ranks) for t in tensors)
        return super().allgather(tensors, label)

    def alltoall(self, tensor: Tensor, splits: Sequence[int], label: str = "") -> Any:
        self.traffic += tensor.nbytes * (self.num_ranks - 1) / self.num_ranks
        return super().alltoall(tensor, splits, label)


def _bucket(tensors: list[Tensor], shapes: Sequence[Any], op: Any = hvd.Average) -> Counted:
    names = [f"parameter{index}" for index in range(len(tensors))]
    return Counted("bucket", names, shapes, tensors, Reduction(op), hvd.global_process_set)


def _reduce(hook: Any, tensors: list[Tensor], shapes: Sequence[Any], op: Any = hvd.Average) -> Any:
    """Reduce in place; what was sent."""
    bucket = _bucket(tensors, shapes, op)
    hook.start(bucket)()
    return bucket.traffic


@dataclass
class Outcome:
    """Of one rank: results of each step for each parameter, and residuals in the end."""

    results: list[list[Tensor]]
    traffic: float
    residuals: dict[str, Tensor]


def _steps(name: str, group: list[Gradient], op: hvd.mpi_ops.ReduceOp, num_steps: int) -> Outcome:
    hook = HOOKS[name]()
    results = []
    for step in range(num_steps):
        tensors = [gradient.of(hvd.rank(), step) for gradient in group]
        traffic = _reduce(hook, tensors, [gradient.shape for gradient in group], op)
        results.append(tensors)
    return Outcome(results, traffic, hook.state_dict().get("residuals", {}))


def _same(outcomes: list[Outcome]) -> None:
    for outcome in outcomes[1:]:
        for mine, theirs in zip(outcome.results, outcomes[0].results, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b), "ranks differ"


def _check_error(
    hook: CompressingHook, gradient: Gradient, result: Tensor, scale: float, size: int
) -> None:
    """That the first result is as near to the exact one as the method says."""
    inputs = [gradient.of(rank, 0) for rank in range(size)]
    if gradient.dtype.is_complex:
        exact = sum(inputs) * scale
        torch.testing.assert_close(result, exact)
        return
    inputs = [each.double() for each in inputs]
    exact = torch.stack(inputs).sum(0) * scale
    plain = allreduce_traffic(math.prod(gradient.shape) * gradient.dtype.itemsize, size)
    compressed = hook.traffic(gradient.shape, gradient.dtype, size) < plain
    # Rounding of what is sent, of sums, and of the result.
    magnitude = torch.stack(inputs).abs().sum(0) * scale
    slack = 4 * PRECISION[gradient.dtype] * magnitude + 1e-7
    error = (result.double() - exact).abs()
    if not compressed or getattr(hook, "start_iteration", 0):
        assert (error <= slack).all()
    elif isinstance(hook, hooks.FP16 | hooks.BF16):
        assert (error <= 4 * PRECISION[hook._dtype] * magnitude + slack).all()
    elif isinstance(hook, hooks.TopK):
        count = hook._num_sent(len(exact))
        smallest_sent = [each.abs().topk(count).values[-1] for each in inputs]
        assert (error <= sum(smallest_sent) * scale * (1 + 1e-6) + slack).all()
        assert int((result != 0).sum()) <= size * count
        if gradient.dtype in (torch.float32, torch.float64):  # half precision has ties
            kept = [
                torch.where(each.abs() >= least, each, 0.0)
                for each, least in zip(inputs, smallest_sent, strict=True)
            ]
            sparse = torch.stack(kept).sum(0) * scale
            assert ((result.double() - sparse).abs() <= slack).all()
    elif isinstance(hook, hooks.EightBit):
        largest = [_block_maxima(each) for each in inputs]
        bound = 2.1 * torch.stack(largest).sum(0) * scale / 254
        assert (error <= bound + slack).all()
    else:
        assert isinstance(hook, hooks.PowerSGD)
        rows = gradient.shape[0]
        found, wanted = result.double().view(rows, -1), exact.view(rows, -1)
        numbers = torch.linalg.svdvals(found)
        fuzz = 64 * PRECISION[gradient.dtype] + 1e-4
        assert (numbers[hook.matrix_approximation_rank :] <= fuzz * wanted.norm()).all()
        # A projection: what is left out has nothing in common with what is there.
        assert (found.t() @ (wanted - found)).norm() <= fuzz * wanted.norm() ** 2


def _block_maxima(flat: Tensor) -> Tensor:
    """For each element, the largest magnitude in its block."""
    padded = torch.nn.functional.pad(flat.abs(), (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return padded.amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)[: len(flat)]


@pytest.mark.parametrize("name", HOOKS)
@given(group=st.lists(gradients(), min_size=2, max_size=6), op=OPS)
@settings(max_examples=examples(15), deadline=None)
def test_error_and_traffic_of_one_reduction(pool3: RankPool, name, group, op):
    outcomes = pool3.run(_steps, name, group, op, 1)
    _same(outcomes)
    hook = HOOKS[name]()
    scale = 1 / 3 if op is hvd.Average else 1.0
    for gradient, result in zip(group, outcomes[0].results[0], strict=True):
        assert result.dtype is gradient.dtype
        _check_error(hook, gradient, result, scale, 3)
    if name != "PowerSGD late":
        sent = sum(outcome.traffic for outcome in outcomes) / 3
        said = sum(hook.traffic(gradient.shape, gradient.dtype, 3) for gradient in group)
        assert sent == pytest.approx(said)


@pytest.mark.parametrize("name", FEEDBACK)
@given(group=st.lists(gradients(FLOATING), min_size=2, max_size=5), op=OPS)
@settings(max_examples=examples(12), deadline=None)
def test_what_is_left_out_comes_later(pool2: RankPool, name, group, op):
    """What was sent in all steps and what is still owed is what came in."""
    outcomes = pool2.run(_steps, name, group, op, STEPS)
    _same(outcomes)
    scale = 1 / 2 if op is hvd.Average else 1.0
    for index, gradient in enumerate(group):
        came = [gradient.of(rank, step).double() for rank in range(2) for step in range(STEPS)]
        total = torch.stack(came).sum(0)
        sent = sum(results[index].double() for results in outcomes[0].results) / scale
        for outcome in outcomes:
            sent = sent + outcome.residuals.get(f"parameter{index}", torch.zeros(()))
        precision = max(PRECISION[gradient.dtype], PRECISION[torch.float32])
        slack = 64 * precision * torch.stack(came).abs().amax(0) + 1e-6
        if name.startswith("PowerSGD"):  # every element depends on all
            slack = slack + 1e-5 * torch.stack(came).norm()
        assert ((sent - total).abs() <= slack + 64 * precision * sent.abs()).all()


def _low_rank(num_rows: int, num_columns: int, rank: int, spread: float = 1.0) -> Tensor:
    """The same on all ranks, but for factors that average to one."""
    generator = torch.Generator().manual_seed(7)
    left = torch.linalg.qr(torch.randn(num_rows, rank, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(num_columns, rank, generator=generator)).Q
    numbers = spread ** torch.arange(rank)
    factor = 0.5 if hvd.rank() == 0 else 1.5
    return factor * (left * numbers) @ right.t()


def _powersgd_of_low_rank(op: Any) -> tuple[Tensor, Tensor]:
    gradient = _low_rank(30, 20, 2).view(-1)
    exact = hvd.allreduce(gradient, op=op)
    _reduce(hooks.PowerSGD(2), [gradient], [(30, 20)], op)
    return gradient, exact


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_powersgd_is_exact_for_low_ranks(pool2: RankPool, op):
    for result, exact in pool2.run(_powersgd_of_low_rank, op):
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-6)


def _powersgd_of_constant() -> tuple[Tensor, Tensor]:
    hook = hooks.PowerSGD(2, error_feedback=False)
    for _ in range(12):
        gradient = _low_rank(30, 20, 6, spread=0.3).view(-1)
        _reduce(hook, [gradient], [(30, 20)])
    assert hook.state_dict()["residuals"] == {}
    return gradient.view(30, 20), _low_rank(30, 20, 6, spread=0.3)


def test_powersgd_finds_the_best_approximation(pool2: RankPool):
    results = pool2.run(_powersgd_of_constant)
    mean = (results[0][1] + results[1][1]) / 2
    left, numbers, right = torch.linalg.svd(mean)
    best = (left[:, :2] * numbers[:2]) @ right[:2]
    for result, _ in results:
        torch.testing.assert_close(result, best, rtol=1e-3, atol=1e-5)


def _powersgd_after_nothing() -> list[Tensor]:
    """Zeros at first; then one element, in a row and a column of their own."""
    hook = hooks.PowerSGD(2)
    results = []
    for step in range(5):
        gradient = torch.zeros(20, 30)
        if step >= 2:
            gradient[17, 23] = step
        flat = gradient.view(-1)
        _reduce(hook, [flat], [gradient.shape])
        results.append(flat)
    return results


def test_powersgd_never_looks_the_wrong_way_for_good(pool2: RankPool):
    for results in pool2.run(_powersgd_after_nothing):
        assert not any(result.any() for result in results[:2])
        assert sum(results).sum().item() == pytest.approx(2 + 3 + 4, rel=1e-4)


def _powersgd_start(start: int) -> list[bool]:
    """Whether the result has full rank, step by step."""
    hook = hooks.PowerSGD(1, start_iteration=start)
    full = []
    for step in range(4):
        gradient = torch.randn(9 * 8, generator=torch.Generator().manual_seed(step))
        _reduce(hook, [gradient], [(9, 8)])
        full.append(int(torch.linalg.matrix_rank(gradient.view(9, 8), rtol=1e-3)) == 8)
    return full


@pytest.mark.parametrize("start", [0, 1, 3])
def test_powersgd_starts_when_told(pool2: RankPool, start: int):
    assert pool2.run(_powersgd_start, start) == [[step < start for step in range(4)]] * 2


def _exactly(name: str, values: Tensor) -> tuple[Tensor, Tensor]:
    gradient = values * (1 + hvd.rank())
    exact = hvd.allreduce(gradient)
    _reduce(HOOKS[name](), [gradient], [gradient.shape])
    return gradient, exact


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("TopK 1", torch.arange(500.0).sin()),
        ("TopK 0.2", torch.arange(500.0) * (torch.arange(500) % 5 == 0)),
        ("EightBit", torch.tensor([-127.0, 0, 127, 1]).repeat(200) * 2**-20),
        ("EightBit", torch.zeros(500)),
        ("PowerSGD 1", torch.zeros(20, 30).view(-1)),
        ("FP16", torch.arange(-500.0, 500)),
        ("BF16", torch.arange(-32.0, 32)),
    ],
)
def test_exact_cases(pool2: RankPool, name: str, values: Tensor):
    # Ranks send once and twice the values, which even numbers survive in the narrow types.
    values = values * 2 if name in ("FP16", "BF16") else values
    for result, exact in pool2.run(_exactly, name, values):
        assert torch.equal(result, exact)


def _unusual(name: str, value: float) -> list[list[Tensor]]:
    """Results before, with and after an inf or NaN on one rank; and of a hook without any."""
    hook, undisturbed = HOOKS[name](), HOOKS[name]()
    results = []
    for step in range(5):
        gradient = Gradient((30, 40), torch.float32, 0, 1).of(hvd.rank(), step)
        if step == 2:
            gradient[5] = value if hvd.rank() == 1 else 0.0
            _reduce(hook, [gradient], [(30, 40)])
            results.append([gradient])
        else:
            twin = gradient.clone()
            _reduce(hook, [gradient], [(30, 40)])
            _reduce(undisturbed, [twin], [(30, 40)])
            results.append([gradient, twin])
    return results


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", HOOKS)
def test_a_step_that_cannot_be_taken_leaves_no_trace(pool2: RankPool, name: str, value: float):
    for results in pool2.run(_unusual, name, value):
        assert not results[2][0].isfinite().all()
        for step in (0, 1, 3, 4):
            gradient, twin = results[step]
            assert gradient.isfinite().all()
            if name != "PowerSGD late":  # it counts the step
                assert torch.equal(gradient, twin)


def _restored(name: str) -> bool:
    """Whether a hook that loaded another's state goes on as that one does."""
    hook, other = HOOKS[name](), HOOKS[name]()
    group = [Gradient((30, 40), torch.float32, 0, 1), Gradient((600,), torch.bfloat16, 0, 2)]
    shapes = [gradient.shape for gradient in group]
    for step in range(3):
        _reduce(hook, [gradient.of(hvd.rank(), step) for gradient in group], shapes)
    file = io.BytesIO()
    torch.save(hook.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    same = True
    for step in range(3, 5):
        mine, others = ([g.of(hvd.rank(), step) for g in group] for _ in range(2))
        _reduce(hook, mine, shapes)
        _reduce(other, others, shapes)
        same &= all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    return same


@pytest.mark.parametrize("name", HOOKS)
def test_state_goes_on(pool2: RankPool, name: str):
    assert pool2.run(_restored, name) == [True, True]


def _foreign_state(name: str) -> str:
    hook, other = HOOKS[name](), HOOKS[name]()
    _reduce(hook, [torch.ones(600)], [(20, 30)])
    other.load_state_dict(hook.state_dict())
    with pytest.raises(ValueError) as caught:
        other.start(_bucket([torch.ones(1200)], [(30, 40)]))
    return str(caught.value)


@pytest.mark.parametrize("name", ["PowerSGD 1", "TopK", "EightBit"])
def test_state_of_another_model(pool2: RankPool, name: str):
    for message in pool2.run(_foreign_state, name):
        assert "'parameter0'" in message
        assert "another model" in message


def test_state_of_another_kind():
    with pytest.raises(ValueError, match="not the state of EightBit"):
        hooks.EightBit().load_state_dict(hooks.PowerSGD().state_dict())
    with pytest.raises(ValueError, match="directions"):
        hooks.PowerSGD().load_state_dict(hooks.TopK().state_dict())
    with pytest.raises(ValueError, match="not the state of FP16"):
        hooks.FP16().load_state_dict({"residuals": {}})
    with pytest.raises(ValueError, match="NoneType"):
        hooks.TopK().load_state_dict(None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hooks.PowerSGD(0), "matrix_approximation_rank must be"),
        (lambda: hooks.PowerSGD(1.5), "matrix_approximation_rank must be"),
        (lambda: hooks.PowerSGD(start_iteration=-1), "start_iteration must"),
        (lambda: hooks.TopK(0), "ratio must be"),
        (lambda: hooks.TopK(1.01), "ratio must be"),
        (lambda: hooks.TopK(math.nan), "ratio must be"),
    ],
)
def test_bad_settings(make: Callable[[], Any], said: str):
    with pytest.raises(ValueError, match=said):
        make()


def test_settings_are_shown():
    assert repr(hooks.FP16()) == "FP16()"
    assert repr(hooks.TopK(0.5)) == "TopK(ratio=0.5, error_feedback=True)"
    assert repr(hooks.PowerSGD(3, error_feedback=False)) == (
        "PowerSGD(matrix_approximation_rank=3, start_iteration=0, error_feedback=False)"
    )
