"""Compression of what travels."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor
from horovod.transport import eight_bits
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


def test_eight_bits():
    one, other = run_ranks(_in_eight_bits, 2, env={"HOROVOD_CPU_OPERATIONS": "gloo"})
    for name, tensors in one.items():
        assert all(map(torch.equal, tensors, other[name]))
        mean, *coded = tensors
        for result in coded:
            exact = mean[: len(result)]
            assert float((result - exact).abs().max()) < float(exact.abs().max()) / 8
            assert len(result) < 1000 or not torch.equal(result, exact), "it travelled as it was"


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_rows_of_eight_bits_are_read_as_torch_does(kind: torch.dtype):
    blocks = torch.randn(5, 256) * torch.tensor([[1.0], [1e-30], [1e30], [0.0], [3.0]])
    blocks[4, 7] = float("inf")
    rows = torch.empty(5, eight_bits.ROW, dtype=torch.uint8)
    eight_bits.encode(blocks, rows, kind)
    found = torch.empty_like(blocks)
    eight_bits.decode(rows, found, kind)
    scales = rows[:, 256:].contiguous().view(torch.float32)
    expected = rows[:, :256].contiguous().view(kind).float() * scales
    assert torch.equal(found[:4], expected[:4])
    largest = blocks.abs().amax(1, keepdim=True)
    assert bool(((found - blocks).abs() <= largest / 14)[:4].all())
    assert not bool(torch.isfinite(found[4]).all())
