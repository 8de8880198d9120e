"""Generated collectives: what to call, what must come out, and how to run it on one rank.

Every rank makes everybody's input from the case's seed, computes what a single process would get,
and compares. It returns a digest of its result, so that the caller can see that all ranks have
the same bits where they must.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import MAX_WORDS, Transport

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """One collective.

    `counts` has one entry for each rank, a row of them for alltoall, or for a vector one for each
    of its tensors.
    """

    kind: str
    dtype: str = "float32"
    op: ReduceOp = ReduceOp.SUM
    values: str = "whole"
    counts: Any = ()
    root: int = 0
    seed: int = 0
    words: tuple[tuple[int, ...], ...] = ()
    preloads: tuple[int, ...] = ()
    use_preload: bool = field(default=False)


def lengths(size: int) -> st.SearchStrategy[int]:
    """Nothing, one, odd ones, and enough to cross the limits of every transport."""
    edges = [0, 1, size - 1, size, size + 1, 8191, 8193]
    return st.one_of(
        st.sampled_from(edges), st.integers(0, 400), st.integers(0, 40_000), st.integers(0, 700_000)
    )


def cases(size: int) -> st.SearchStrategy[Case]:
    dtype = st.sampled_from(sorted(DTYPES))
    seed = st.integers(0, 2**31)
    rank = st.integers(0, size - 1)
    ragged = st.lists(lengths(size), min_size=size, max_size=size)
    reductions = st.tuples(dtype, st.sampled_from(OPS), st.sampled_from(VALUES)).filter(
        lambda chosen: chosen[1] == ReduceOp.SUM or not DTYPES[chosen[0]].is_complex
    )

    def reduction(kind: str, counts: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
        return st.builds(
            lambda chosen, counts, seed: Case(kind, *chosen, counts=counts, seed=seed),
            reductions,
            counts,
            seed,
        )

    return st.one_of(
        reduction("allreduce", lengths(size)),
        reduction("allreduce_vector", st.lists(lengths(size), min_size=1, max_size=5)),
        st.builds(
            Case,
            st.sampled_from(["allreduce_narrow", "allreduce_int8", "allreduce_fp8"]),
            st.sampled_from(["float32", "float64"]),
            values=st.sampled_from(["whole", "random"]),
            counts=lengths(size),
            seed=seed,
        ),
        reduction("reduce_scatter", ragged),
        st.builds(Case, st.just("allgather"), dtype, counts=ragged, seed=seed),
        st.builds(Case, st.just("gather_bytes"), st.just("uint8"), counts=ragged, seed=seed),
        st.builds(Case, st.just("broadcast"), dtype, counts=lengths(size), root=rank, seed=seed),
        st.builds(
            Case,
            st.just("alltoall"),
            dtype,
            counts=st.lists(ragged, min_size=size, max_size=size),
            seed=seed,
        ),
        st.just(Case("barrier")),
        agreements(size),
    )


@st.composite
def agreements(draw: st.DrawFn, size: int) -> Case:
    """Queues with a common beginning; some are shorter, some differ at one place."""
    word = st.integers(-(2**63), 2**63 - 1)
    length = draw(st.one_of(st.integers(0, 5), st.integers(28, 36), st.integers(0, MAX_WORDS)))
    common = draw(st.lists(word, min_size=min(length, 4), max_size=min(length, 4)))
    common = (common * MAX_WORDS)[:length]
    queues = []
    for _ in range(size):
        queue = list(common)
        if draw(st.booleans()) and length:
            place = draw(st.integers(0, length - 1))
            if draw(st.booleans()):
                queue[place] = draw(word)
            else:
                del queue[place:]
        queues.append(tuple(queue))
    same = len(set(queues)) == 1
    preload = draw(st.one_of(st.none(), st.sampled_from([0, 1, 100, 8192, 50_000, 100_000])))
    preloads: tuple[int, ...] = ()
    if preload is not None:  # ranks that disagree may be about to reduce different tensors
        preloads = tuple(preload if same else preload + rank for rank in range(size))
    return Case(
        "agree",
        words=tuple(queues),
        preloads=preloads,
        use_preload=bool(preloads) and same and draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


# -- in a rank -----------------------------------------------------------------------------------

VALUES = ["whole", "random", "special"]


def data(case: Case, rank: int, count: int, salt: int = 0) -> torch.Tensor:
    """The input of `rank`. "whole" numbers are reduced exactly whatever the order."""
    generator = torch.Generator().manual_seed(case.seed * 31 + rank * 7 + salt)
    dtype = DTYPES[case.dtype]
    whole = torch.randint(-3, 4, (count,), generator=generator)
    if case.op == ReduceOp.PRODUCT:
        whole = torch.randint(1, 3, (count,), generator=generator)
    if not dtype.is_floating_point or case.values == "whole":
        return whole.to(dtype)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    if case.values == "special":
        special = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
        values[::3] = special[torch.randint(0, 4, values[::3].shape, generator=generator)].double()
    return values.to(dtype)


def reduced(case: Case, inputs: list[torch.Tensor]) -> torch.Tensor:
    dtype = inputs[0].dtype
    everything = (
        torch.stack([each.double() for each in inputs])
        if dtype.is_floating_point
        else (torch.stack(inputs))
    )
    if dtype == torch.bool:
        either = case.op in (ReduceOp.SUM, ReduceOp.MAX)
        return everything.any(0) if either else everything.all(0)
    if case.op == ReduceOp.SUM:
        return everything.sum(0).to(dtype)
    if case.op == ReduceOp.PRODUCT:
        return everything.prod(0).to(dtype)
    if case.op == ReduceOp.MIN:
        return everything.amin(0).to(dtype)
    return everything.amax(0).to(dtype)


def check(case: Case, got: torch.Tensor, expected: torch.Tensor) -> None:
    if case.values == "whole" or not got.dtype.is_floating_point:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        return
    tolerance = TOLERANCE.get(got.dtype, 1e-12)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=4 * tolerance, equal_nan=True)


def digest(tensor: torch.Tensor) -> str:
    content = bytes(tensor.contiguous().view(torch.uint8).numpy())
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def run(transport: Transport, case: Case) -> str:
    """Run the case; AssertionError if the result is wrong. Equal on all ranks where it must be."""
    return globals()[f"_{case.kind}"](transport, case)


def _allreduce(transport: Transport, case: Case) -> str:
    inputs = [data(case, rank, case.counts) for rank in range(transport.size)]
    tensor = inputs[transport.rank].clone()
    transport.allreduce(tensor, case.op)
    check(case, tensor, reduced(case, inputs))
    return digest(tensor)


def _allreduce_vector(transport: Transport, case: Case) -> str:
    everyone = [data(case, rank, sum(case.counts)) for rank in range(transport.size)]
    counts = case.counts if transport.vectored else [sum(case.counts)]
    vector = [part.clone() for part in everyone[transport.rank].split(counts)]
    transport.allreduce_vector(vector, case.op)
    got = torch.cat(vector)
    check(case, got, reduced(case, everyone))
    return digest(got)


def _allreduce_narrow(transport: Transport, case: Case) -> str:
    """Between hosts as bfloat16, which whole numbers of this size survive."""
    inputs = [data(case, rank, case.counts) for rank in range(transport.size)]
    tensor = inputs[transport.rank].clone()
    transport.allreduce_vector([tensor], ReduceOp.SUM, 0.5, torch.bfloat16)
    expected = reduced(case, inputs) / 2
    tolerance = 0 if case.values == "whole" else TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=4 * tolerance)
    return digest(tensor)


def _allreduce_coded(transport: Transport, case: Case) -> str:
    """Between hosts in 8 bits: each rank's numbers are rounded, and the sum of every 256 is."""
    inputs = [data(case, rank, case.counts) for rank in range(transport.size)]
    tensor = inputs[transport.rank].clone()
    wire = torch.int8 if case.kind == "allreduce_int8" else torch.float8_e4m3fn
    transport.allreduce_vector([tensor], ReduceOp.SUM, 0.5, wire)
    expected = reduced(case, inputs) / 2
    most = sum(float(each.abs().max()) for each in inputs) if case.counts else 0.0
    tolerance = most / 127 if wire is torch.int8 else most / 14
    torch.testing.assert_close(tensor, expected, rtol=0, atol=tolerance)
    return digest(tensor)


_allreduce_int8 = _allreduce_fp8 = _allreduce_coded


def _reduce_scatter(transport: Transport, case: Case) -> str:
    inputs = [data(case, rank, sum(case.counts)) for rank in range(transport.size)]
    output = torch.empty(case.counts[transport.rank], dtype=DTYPES[case.dtype])
    transport.reduce_scatter(inputs[transport.rank].clone(), output, case.counts, case.op)
    start = sum(case.counts[: transport.rank])
    check(case, output, reduced(case, inputs)[start : start + output.numel()])
    return ""


def _allgather(transport: Transport, case: Case) -> str:
    inputs = [data(case, rank, count) for rank, count in enumerate(case.counts)]
    output = torch.empty(sum(case.counts), dtype=DTYPES[case.dtype])
    transport.allgather(inputs[transport.rank], output, case.counts)
    check(case, output, torch.cat(inputs))
    return digest(output)


def _gather_bytes(transport: Transport, case: Case) -> str:
    inputs = [data(case, rank, count).numpy().tobytes() for rank, count in enumerate(case.counts)]
    assert transport.gather_bytes(inputs[transport.rank]) == inputs
    return ""


def _broadcast(transport: Transport, case: Case) -> str:
    tensor = data(case, transport.rank, case.counts)
    transport.broadcast(tensor, case.root)
    check(case, tensor, data(case, case.root, case.counts))
    return digest(tensor)


def _alltoall(transport: Transport, case: Case) -> str:
    me, size = transport.rank, transport.size
    parts = [[data(case, a, case.counts[a][b], salt=b) for b in range(size)] for a in range(size)]
    expected = torch.cat([parts[other][me] for other in range(size)])
    output = torch.empty_like(expected)
    received = [case.counts[other][me] for other in range(size)]
    transport.alltoall(torch.cat(parts[me]), output, case.counts[me], received)
    check(case, output, expected)
    return ""


def _barrier(transport: Transport, case: Case) -> str:
    transport.barrier()
    return ""


def _agree(transport: Transport, case: Case) -> str:
    words = case.words[transport.rank]
    preload = None
    if case.preloads:
        preload = data(case, transport.rank, case.preloads[transport.rank])
    vector = None if preload is None else [preload]
    common = transport.agree(struct.pack(f"{len(words)}q", *words), vector)
    together = min(len(queue) for queue in case.words)
    columns = zip(*(queue[:together] for queue in case.words), strict=True)
    expected = next((i for i, column in enumerate(columns) if len(set(column)) > 1), together)
    assert common == expected, (common, expected)
    if case.use_preload and preload is not None and vector is not None:
        inputs = [data(case, rank, count) for rank, count in enumerate(case.preloads)]
        transport.allreduce_vector(vector, ReduceOp.SUM)
        check(case, preload, reduced(case, inputs))
        return digest(preload)
    return ""
