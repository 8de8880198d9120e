"""Every collective over several hosts, for every way of carrying it."""

from __future__ import annotations

import hashlib
import re

import pytest
import torch

import horovod.torch as hvd
from tests.engine.test_adasum import reference as adasum
from tests.hosts import INTERFACE, Hosts
from tests.torch.reference import Case

INFO = {"HOROVOD_LOG_LEVEL": "info"}
SMALL, LARGE = (7,), (3, 50_001)  # one lane, and as many as the hosts allow

LENGTHS = [5, 100_003]

REDUCTIONS = [
    Case(torch.float32, SMALL, op=hvd.Sum, prescale=0.5, postscale=4.0),
    Case(torch.float32, LARGE, op=hvd.Average),
    Case(torch.float64, LARGE, op=hvd.Sum, layout="transposed"),
    Case(torch.float16, LARGE, op=hvd.Sum),
    Case(torch.bfloat16, SMALL, op=hvd.Min),
    Case(torch.int64, SMALL, op=hvd.Product),
    Case(torch.uint8, LARGE, op=hvd.Max),
    Case(torch.bool, SMALL, op=hvd.Sum),
    Case(torch.complex64, SMALL, op=hvd.Sum),
    Case(torch.float32, (0, 3), op=hvd.Sum),
]


def _noise(rank: int, *shape: int) -> torch.Tensor:
    """Numbers whose sum depends on the order of summation."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def _reductions(rank: int) -> list[torch.Tensor]:
    results = [
        hvd.allreduce(
            case.tensor(rank),
            name=f"case {number}",
            op=case.op,
            prescale_factor=case.prescale,
            postscale_factor=case.postscale,
        )
        for number, case in enumerate(REDUCTIONS)
    ]
    results += [hvd.allreduce(_noise(rank, n), name=f"noise {n}", op=hvd.Sum) for n in LENGTHS]
    results.append(hvd.allreduce(_noise(rank, LENGTHS[-1]), name="adasum", op=hvd.Adasum))
    fused = [hvd.allreduce_async(_noise(rank, 50 + i), name=f"fused {i}") for i in range(20)]
    return results + [hvd.synchronize(handle) for handle in fused]


def _check_reductions(results: list[torch.Tensor], size: int) -> None:
    """In the test's process: what torch imports for comparing takes a second in every rank."""
    left = iter(results)
    for case in REDUCTIONS:
        case.check(next(left), size)
    for length in LENGTHS:
        expected = torch.stack([_noise(r, length) for r in range(size)]).sum(0)
        torch.testing.assert_close(next(left), expected)
    vectors = [_noise(r, LENGTHS[-1]).double().numpy() for r in range(size)]
    torch.testing.assert_close(next(left), torch.from_numpy(adasum(vectors)).float())
    for number, result in enumerate(left):
        expected = torch.stack([_noise(r, 50 + number) for r in range(size)]).mean(0)
        torch.testing.assert_close(result, expected)


def _movements(rank: int, size: int) -> None:
    for width in (1, 20_001):
        gathered = hvd.allgather(_noise(rank, rank + 1, width), name=f"gather {width}")
        assert torch.equal(gathered, torch.cat([_noise(r, r + 1, width) for r in range(size)]))
        for root in range(size):
            received = hvd.broadcast(_noise(rank, width, 3), root, name=f"from {root} {width}")
            assert torch.equal(received, _noise(root, width, 3))
        # Rank r sends r + s rows to rank s.
        rows = [rank + other for other in range(size)]
        mine = torch.full((sum(rows), width), float(rank))
        sent = torch.tensor(rows, dtype=torch.int32)
        got, splits = hvd.alltoall(mine, sent, name=f"swap {width}")
        assert splits.tolist() == rows
        assert got[:, -1].tolist() == [float(r) for r in range(size) for _ in range(r + rank)]
        whole = torch.arange(size * 2 + 1).unsqueeze(1).repeat(1, width) * (rank + 1)
        share = hvd.reducescatter(whole, name=f"scatter {width}", op=hvd.Sum)
        shares = hvd.allgather(share, name=f"shares {width}")
        total = torch.arange(size * 2 + 1).unsqueeze(1).repeat(1, width)
        assert torch.equal(shares, total * (size * (size + 1) // 2))
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert hvd.broadcast_object(f"from {rank}", size - 1) == f"from {size - 1}"
    hvd.barrier()


def _uneven_epochs(rank: int, size: int) -> None:
    """Rank r has r + 1 batches, so at the end only the last rank, on the last host, has one."""
    averages = [float(hvd.allreduce(torch.tensor([12.0]), name="batch")) for _ in range(rank + 1)]
    assert averages == [12.0 * (size - batch) / size for batch in range(rank + 1)]
    assert hvd.join() == size - 1


def _everything(rank: int, size: int) -> tuple[str, list[torch.Tensor] | None]:
    hvd.init()
    results = _reductions(rank)
    _movements(rank, size)
    _uneven_epochs(rank, size)
    digest = hashlib.sha256()
    for tensor in results:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), results if rank == 0 else None


def _check(
    hosts: Hosts, ranks_per_host: list[int], env: dict[str, str], expected: str, in_turn: bool
) -> None:
    with hosts.start(_everything, ranks_per_host, env=INFO | env, in_turn=in_turn) as ranks:
        seen = ranks.results()
        _check_reductions(seen[0][1], ranks.size)
        assert len({digest for digest, _ in seen}) == 1, "the ranks' results differ in some bits"
        output = ranks.output(0)
        assert re.search(rf"all ranks: CPU tensors through {expected}", output), output


@pytest.mark.parametrize(
    ("ranks_per_host", "in_turn", "expected"),
    [
        ([2, 2], False, r"HIERARCHICAL \(2 hosts, SHM inside and TCP between them\)"),
        ([2, 2], True, r"HIERARCHICAL \(2 hosts, SHM inside and TCP between them\)"),
        ([2, 1], False, r"HIERARCHICAL \(2 hosts, "),
        ([1, 2], False, r"HIERARCHICAL \(2 hosts, "),
        ([1, 1, 1], False, r"TCP \(3 hosts with one rank each\)"),
    ],
    ids=["2+2", "2+2 in turn", "2+1", "1+2", "1+1+1"],
)
def test_layouts(hosts: Hosts, ranks_per_host: list[int], in_turn: bool, expected: str):
    _check(hosts, ranks_per_host, {}, expected, in_turn)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}, r"HIERARCHICAL \(2 hosts"),
        ({"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}, r"HIERARCHICAL \(2 hosts"),
        (
            {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0", "HOROVOD_HIERARCHICAL_ALLGATHER": "0"},
            r"TCP \(hierarchical operations are switched off\)",
        ),
        ({"HOROVOD_CPU_OPERATIONS": "gloo"}, r"TCP \(TCP was asked for\)"),
        (
            {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"},
            r"HIERARCHICAL \(2 hosts, SHM inside",
        ),
        ({"HOROVOD_GLOO_IFACE": INTERFACE}, r"HIERARCHICAL \(2 hosts"),
        # Containers may have one host name, and still share no memory.
        ({"HOROVOD_HOSTNAME": "same"}, r"HIERARCHICAL \(2 hosts, SHM inside"),
    ],
    ids=[
        "flat allreduce",
        "flat allgather",
        "both flat",
        "gloo",
        "gloo and hierarchical",
        "interface",
        "same host name",
    ],
)
def test_what_is_asked_for(hosts: Hosts, env: dict[str, str], expected: str):
    _check(hosts, [2, 1], env, expected, in_turn=False)


def _refused(rank: int, size: int) -> str:
    with pytest.raises(ValueError) as caught:
        hvd.init()
    return str(caught.value)


def test_shared_memory_cannot_be_asked_for(hosts: Hosts):
    for reason in hosts.run(_refused, [1, 1], env={"HOROVOD_CPU_OPERATIONS": "shm"}):
        assert "the ranks are on 2 hosts" in reason


def _no_such_interface(rank: int, size: int) -> str:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.init()
    return str(caught.value)


def test_an_interface_that_is_not_there(hosts: Hosts):
    env = {"HOROVOD_GLOO_IFACE": "eth7", "HOROVOD_GLOO_TIMEOUT_SECONDS": "100"}
    for reason in hosts.run(_no_such_interface, [1, 1], env=env):
        assert "no interface 'eth7'" in reason
        assert INTERFACE in reason
