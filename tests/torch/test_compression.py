"""Compression of what travels."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor
from horovod.transport import eight_bits
from horovod.transport.division import share
from tests.ranks import RankPool, run_ranks

NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", sorted(NARROW))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_floating_point_tensors_travel_narrow(name: str, dtype: torch.dtype):
    compressor = getattr(hvd.Compression, name)
    compressed, context = compressor.compress(torch.tensor([1.5, -2.25], dtype=dtype))
    assert compressed.dtype is NARROW[name]
    restored = compressor.decompress(compressed, context)
    assert restored.dtype is dtype
    assert restored.tolist() == [1.5, -2.25]


@pytest.mark.parametrize("name", sorted(NARROW))
def test_other_tensors_travel_as_they_are(name: str):
    compressor = getattr(hvd.Compression, name)
    tensor = torch.tensor([1, 2])
    compressed, context = compressor.compress(tensor)
    assert compressed is tensor
    assert compressor.decompress(compressed, context) is tensor


def test_no_compression():
    tensor = torch.ones(2)
    assert hvd.Compression.none is NoneCompressor
    assert hvd.Compression.fp16 is FP16Compressor
    assert NoneCompressor.compress(tensor) == (tensor, None)
    assert NoneCompressor.decompress(tensor, None) is tensor


def test_a_compressor_must_say_how():
    with pytest.raises(NotImplementedError):
        Compressor.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(torch.ones(1), None)


class _Halves(Compressor):
    """A user's own: sends half of every number."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, 2.0

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * ctx


def _with(compression: type[Compressor]) -> list[torch.Tensor]:
    tensor = torch.tensor([1.0, 2.0, 3.0 + hvd.rank()])
    options = {"compression": compression, "op": hvd.Sum}
    return [
        hvd.allreduce(tensor, **options),
        *hvd.grouped_allreduce([tensor, tensor.double()], **options),
        hvd.reducescatter(tensor, **options),
        *hvd.grouped_reducescatter([tensor], **options),
    ]


@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, _Halves]
)
def test_collectives_take_a_compressor(pool2: RankPool, compression: type[Compressor]):
    whole = torch.tensor([2.0, 4.0, 7.0])
    for rank, (one, first, second, *scattered) in enumerate(pool2.run(_with, compression)):
        assert torch.equal(one, whole)
        assert torch.equal(first, whole)
        assert torch.equal(second, whole.double())
        for part in scattered:
            assert torch.equal(part, whole[:2] if rank == 0 else whole[2:])


def _reduced_gradient(rank: int, size: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What an optimizer makes of gradients that neither narrow type can hold, and their mean."""
    hvd.init()
    model = torch.nn.Linear(300, 300, bias=False)  # too large to travel with an agreement
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=getattr(hvd.Compression, name),
    )
    everyone = [1 + torch.rand(300, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(2):  # the first step goes another way than the others
        optimizer.zero_grad()
        (model.weight @ everyone[rank]).sum().backward()
        optimizer.synchronize()
    assert model.weight.grad is not None
    return model.weight.grad.clone(), torch.stack(everyone).mean(0).expand(300, 300)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_optimizers_compress_what_crosses_hosts_and_nothing_else(name: str, dtype: torch.dtype):
    for gradient, mean in run_ranks(_reduced_gradient, 2, name):
        torch.testing.assert_close(gradient, mean)
    network = {"HOROVOD_CPU_OPERATIONS": "gloo"}
    (first, mean), (second, _) = run_ranks(_reduced_gradient, 2, name, env=network)
    assert torch.equal(first, second)
    assert torch.equal(first, first.to(dtype).float()), "it did not travel in the narrow type"
    torch.testing.assert_close(first, mean, rtol=1e-2, atol=0)


def _in_eight_bits(rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    """What travels as fp8 and as int8, between ranks that the network connects."""
    hvd.init()
    found = {}
    for name, compression in (("fp8", hvd.Compression.fp8), ("int8", hvd.Compression.int8)):
        values = torch.randn(40_000, generator=torch.Generator().manual_seed(rank))
        mean = hvd.allreduce(values, name="exact")
        reduced = hvd.allreduce(values, name=name, compression=compression)
        grouped = hvd.grouped_allreduce([values, values[:300]], compression=compression)
        params = [torch.nn.Parameter(torch.zeros(40_000))]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0), compression=compression, local_steps=2
        )
        for _ in range(2):
            params[0].grad = -values / 2
            optimizer.step()
        narrow = [torch.nn.Parameter(torch.zeros(40_000, dtype=torch.bfloat16))]
        optimizer = hvd.DistributedOptimizer(  # which the ranks exchange themselves, as on devices
            torch.optim.SGD(narrow, lr=1.0), compression=compression
        )
        narrow[0].backward(-values.bfloat16())
        optimizer.step()
        found[name] = [mean, reduced, *grouped, params[0].detach(), narrow[0].detach().float()]
        for wrong in (torch.ones(3, dtype=torch.int32), torch.ones(3, requires_grad=True)):
            with pytest.raises(ValueError, match=f"hvd.Compression.{name} works with"):
                hvd.allreduce(wrong, compression=compression)
        with pytest.raises(ValueError, match="Adasum does not add up"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(params, lr=1.0), compression=compression, op=hvd.Adasum
            )
    return found


def _expected_mean(size: int, kind: torch.dtype) -> torch.Tensor:
    """The mean of `_in_eight_bits`'s values, as the ranks' shares of its rows define it."""
    values = [torch.randn(40_000, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    exact = [eight_bits.in_blocks(each) for each in values]
    rows = torch.empty(len(exact[0]), eight_bits.ROW, dtype=torch.uint8)
    coded = eight_bits.Rows(rows, kind)
    received = [torch.empty_like(each) for each in exact]
    for numbers, decoded in zip(exact, received, strict=True):
        coded.encode(numbers)
        coded.decode(decoded)
    total = torch.empty_like(exact[0])
    for owner in range(size):
        start, stop = share(len(rows), eight_bits.ROW, owner, size)
        operands = [exact[r] if r == owner else received[r] for r in range(size)]
        total[start:stop] = sum(each[start:stop] for each in operands)
    coded.encode(total)
    coded.decode(total, factor=1 / size)
    return total.view(-1)[:40_000]


def test_eight_bits():
    found = run_ranks(_in_eight_bits, 3, env={"HOROVOD_CPU_OPERATIONS": "gloo"})
    for name, tensors in found[0].items():
        for other in found[1:]:
            assert all(map(torch.equal, tensors, other[name]))
        mean, *coded = tensors
        for result in coded:
            exact = mean[: len(result)]
            assert float((result - exact).abs().max()) < float(exact.abs().max()) / 8
            assert len(result) < 1000 or not torch.equal(result, exact), "it travelled as it was"
        kind = torch.int8 if name == "int8" else torch.float8_e4m3fn
        expected = _expected_mean(3, kind)
        # A sum may differ in its last bit, and so, rarely, be rounded to the next code.
        is_close = torch.isclose(coded[0], expected, rtol=1e-5, atol=1e-6)
        assert float(is_close.float().mean()) > 0.999


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_rows_of_eight_bits_are_read_as_torch_does(kind: torch.dtype):
    sizes = [1.0, 1e-30, 3e37, 0.0, 1e-38, 1e-43, 3.0] * 100  # more rows than fit into the cache
    blocks = torch.randn(len(sizes), 256).clamp_(-10, 10) * torch.tensor(sizes)[:, None]
    is_finite = torch.tensor(sizes) != 3.0
    blocks[6::7, 7] = float("inf")
    blocks[13::14, 9] = float("nan")
    rows = torch.empty(len(sizes), eight_bits.ROW, dtype=torch.uint8)
    coded = eight_bits.Rows(rows, kind)
    coded.encode(blocks)
    found, added = torch.empty_like(blocks), torch.ones_like(blocks)
    coded.decode(found)
    coded.decode(added, add=True, factor=0.5)
    scales = rows[:, 256:].contiguous().view(torch.float32)
    expected = rows[:, :256].contiguous().view(kind).float() * scales
    assert torch.equal(found[is_finite], expected[is_finite])
    torch.testing.assert_close(added[is_finite], 1 + found[is_finite] / 2)
    largest = blocks.abs().amax(1, keepdim=True)
    bound = (largest / 14).clamp_min(2e-38)  # a scale is a normal number
    assert bool(((found - blocks).abs() <= bound)[is_finite].all())
    assert not bool(torch.isfinite(found[~is_finite]).any(1).all())
