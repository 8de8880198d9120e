"""What collectives must give, computed in one process; and tensors to try them on.

Ranks build their own input from a `Case`, and the test builds everybody's to compute the expected
result, so that no data has to travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from hypothesis import strategies as st

from horovod.common.reduce_op import ReduceOp

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGER = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
EVERY_DTYPE = [torch.bool, *INTEGER, *FLOATING, *COMPLEX]

LAYOUTS = ["contiguous", "transposed", "strided", "offset"]

ORDERED = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


@dataclass(frozen=True)
class Case:
    """Input of one rank's reduction, and how to reduce it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "contiguous"
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    seed: int = 0

    def tensor(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        return lay_out(values(self.dtype, self.shape, generator), self.layout)

    def expected(self, size: int) -> torch.Tensor:
        inputs = [scaled(self.tensor(rank), self.prescale) for rank in range(size)]
        if self.dtype in (torch.float16, torch.bfloat16):
            # Half precision accumulates in single precision and rounds once.
            inputs = [each.float() for each in inputs]
        reduced = reduce(_COMBINE[self.op], inputs).to(self.dtype)
        if self.op is not ReduceOp.AVERAGE:
            return scaled(reduced, self.postscale)
        if self.dtype in INTEGER:
            if self.postscale == 1.0:
                return torch.div(reduced, size, rounding_mode="trunc")
            return (reduced.double() * self.postscale / size).trunc().to(self.dtype)
        return scaled(reduced, self.postscale / size)

    @property
    def exact(self) -> bool:
        """Whether every step of the reduction has an exact result in this type."""
        if self.dtype in INTEGER or self.dtype is torch.bool:
            return True
        dyadic = all(math.frexp(f)[0] == 0.5 for f in (self.prescale, self.postscale))
        return dyadic and self.op is not ReduceOp.AVERAGE

    def check(self, result: torch.Tensor, size: int) -> None:
        expected = self.expected(size)
        if self.exact:
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
        else:
            torch.testing.assert_close(result, expected)


def values(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Small numbers, so that sums and products of a few of them are exact in every type."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype is torch.uint8:
        return torch.randint(0, 3, shape, generator=generator).to(dtype)
    whole = torch.randint(-2, 3, shape, generator=generator)
    if dtype.is_complex:
        imaginary = torch.randint(-2, 3, shape, generator=generator)
        return torch.complex(whole.double(), imaginary.double()).to(dtype)
    return whole.to(dtype)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory in another way."""
    if layout == "transposed":
        back = list(reversed(range(tensor.dim())))
        return tensor.permute(back).contiguous().permute(back)
    if layout == "strided" and tensor.dim():
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "offset":
        room = tensor.new_zeros(tensor.numel() + 3)
        view = room[3:].view(tensor.shape)
        return view.copy_(tensor)
    return tensor


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return tensor
    if tensor.dtype in INTEGER:
        return (tensor.double() * factor).trunc().to(tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor * factor


_COMBINE = {
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
row_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
layouts = st.sampled_from(LAYOUTS)
every_dtype = st.sampled_from(EVERY_DTYPE)


@st.composite
def cases(draw: st.DrawFn, ops: tuple[ReduceOp, ...] = tuple(_COMBINE)) -> Case:
    """Every combination that is defined, of type, shape, layout, operator and factors."""
    op = draw(st.sampled_from(ops))
    dtypes = list(EVERY_DTYPE)
    if op is ReduceOp.AVERAGE:
        dtypes.remove(torch.bool)
    if op in ORDERED:
        dtypes = [dtype for dtype in dtypes if dtype not in COMPLEX]
    dtype = draw(st.sampled_from(dtypes))
    factors = st.sampled_from([1.0, 1.0, 0.5, 0.3, 1 / 3, 0.9] + [2.0] * (op not in ORDERED))
    if dtype is torch.bool:
        factors = st.just(1.0)
    return Case(
        dtype,
        draw(shapes),
        draw(layouts),
        op,
        draw(factors),
        draw(factors),
        draw(st.integers(0, 1000)),
    )
