"""DTensor parameters of `fully_shard`: two copies of a model, each cut in two, trained as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.engine.runtime import runtime
from horovod.torch.gradients.dtensors import Holding, find_sources
from tests.docs.pages import blocks
from tests.ports import reserved_port
from tests.ranks import run_ranks
from tests.torch.training import ROWS, batch_of, loss_of, my_rows, overlapping

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(
    not hasattr(fsdp, "fully_shard"), reason="this version of torch has no fully_shard"
)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
STEPS = 3


class Net(nn.Module):
    """Cut in two, the weights are uneven, the scale is on one rank alone, the spare is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 3)
        self.scale, self.spare = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


def _net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def _sharded(mesh: Any, seed: int = 0) -> Net:
    net = _net(seed)
    fsdp.fully_shard(net.first, mesh=mesh)
    fsdp.fully_shard(net, mesh=mesh)
    return net


def _adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


# -- what a training loop does: each takes a model, an optimizer, and this rank's rows ----------

Pick = Callable[[torch.Tensor], torch.Tensor]


def _plainly(net: nn.Module, optimizer: Any, pick: Pick) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, pick(batch_of(step, hvd.size()))).backward()
        optimizer.step()


def _clipping(net: nn.Module, optimizer: Any, pick: Pick) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, pick(batch_of(step, hvd.size()))).backward()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with optimizer.skip_synchronize() if hasattr(optimizer, "synchronize") else _nothing():
            optimizer.step()


def _accumulating(net: nn.Module, optimizer: Any, pick: Pick) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            (loss_of(net, pick(batch_of(10 * part + step, hvd.size()))) / 2).backward()
        optimizer.step()


def _scaling(net: nn.Module, optimizer: Any, pick: Pick) -> None:
    """One rank meets infinity in the second step: no rank makes it."""
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, pick(batch_of(step, hvd.size())))
        scaler.scale(loss * torch.inf if step == 1 and hvd.rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if hvd.rank() == 1 or len(pick(batch_of(0, hvd.size()))) == ROWS:
        assert scaler.get_scale() == 512.0


def _skipping(net: nn.Module, optimizer: Any, pick: Pick) -> None:
    """What a single process does where the ranks skip a step."""
    for step in (0, 2):
        optimizer.zero_grad()
        loss_of(net, pick(batch_of(step, hvd.size()))).backward()
        optimizer.step()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


LOOPS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (_plainly, _plainly, {}),
    "clipped": (_clipping, _clipping, {}),
    "accumulated": (_accumulating, _accumulating, {"backward_passes_per_step": 2}),
    "scaled": (_scaling, _skipping, {}),
    "grouped": (_plainly, _plainly, {"groups": 2}),
}


def _weights(net: nn.Module) -> list[torch.Tensor]:
    """Those of the whole model, wherever they are."""
    with torch.no_grad():
        return [getattr(p, "full_tensor", p.clone)() for p in net.parameters()]


def _is_close(net: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(_weights(net), _weights(reference), strict=True)
    return all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in pairs)


def _train(mesh: Any, copies: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (loop, reference_loop, options) in LOOPS.items():
        reference = _net()
        reference_loop(reference, _adam(reference), lambda rows: rows)
        for overlap in (False, True):
            net = _sharded(mesh)
            with overlapping(overlap):
                optimizer = hvd.DistributedOptimizer(
                    _adam(net), net.named_parameters(), process_set=copies, **options
                )
                loop(net, optimizer, my_rows)
            label = f"{name} {overlap}"
            found[label] = _is_close(net, reference), [w.tolist() for w in _weights(net)]
    return found


def _meet_one_infinity(mesh: Any, copies: Any) -> None:
    """It is in the part of two ranks. The two others, who cannot see it, skip the step as well."""
    net = _sharded(mesh)
    optimizer = hvd.DistributedOptimizer(_adam(net), process_set=copies)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0)
    scaler.scale(loss_of(net, my_rows(batch_of(0, hvd.size())))).backward()
    if hvd.rank() == 2:
        net.first.weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert _is_close(net, _net())


def _broadcast(mesh: Any, copies: Any) -> list[bool]:
    """The copies differ; then both are the root's, and so are the states of their optimizers."""
    found = []
    for root in (0, 3):
        net = _sharded(mesh, seed=copies.rank())
        hvd.broadcast_parameters(net.state_dict(), root_rank=root)
        found.append(_is_close(net, _net(seed=root // 2)))
        optimizer = _adam(net)
        if hvd.rank() // 2 == root // 2:  # a copy that has been trained before
            _plainly(net, optimizer, my_rows)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        state = optimizer.state[net.first.weight]
        found.append(state["step"].item() == STEPS)
        everyone = hvd.allgather_object(state["exp_avg"].to_local().tolist())
        found.append(everyone[0] == everyone[2] != everyone[1] == everyone[3])
    fresh = _adam(net)
    hvd.broadcast_optimizer_state(fresh, root_rank=1)
    found.append(type(fresh.state[net.first.weight]["exp_avg"]) is type(net.first.weight.data))
    return found


def _refuse(mesh: Any, copies: Any) -> None:
    net = _sharded(mesh)
    named = list(net.named_parameters())
    with pytest.raises(ValueError, match=r"ranks 0 and 1: .* different parts .*pass process_set"):
        hvd.DistributedOptimizer(_adam(net), named)
    with pytest.raises(ValueError, match="op=Adasum combines whole models"):
        hvd.DistributedOptimizer(_adam(net), named, op=hvd.Adasum)
    weight = net.first.weight.detach()
    for refused in (
        lambda: hvd.allreduce(weight),
        lambda: hvd.grouped_allreduce_([weight]),
        lambda: hvd.allgather(weight),
        lambda: hvd.broadcast_(weight, 0),
    ):
        with pytest.raises(ValueError, match=r"not a DTensor; pass tensor.to_local\(\)"):
            refused()
    for options, words in (
        ({"shard_state": True}, "leave shard_state out"),
        ({"overlap_forward": net}, "leave overlap_forward out"),
    ):
        with pytest.raises(ValueError, match=f"'scale' is a DTensor.*{words}"):
            hvd.DistributedOptimizer(_adam(net), named, process_set=copies, **options)
    for setting, words in (("check_nan", "HOROVOD_CHECK_NAN.*unset it"), ("elastic", "elastic")):
        changed = dataclasses.replace(runtime.config, **{setting: True})
        with (
            mock.patch.object(type(runtime), "config", changed),
            pytest.raises(ValueError, match=words),
        ):
            hvd.DistributedOptimizer(_adam(net), named, process_set=copies)


def _job(rank: int, size: int, folder: str) -> tuple[dict[str, Any], list[bool], list[Any]]:
    sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
    hvd.init(process_sets=sets)
    copies = sets[rank % 2]
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", None, size, rank)
    names = ("copies", "parts")
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)["parts"]
    found = _train(mesh, copies), _broadcast(mesh, copies)
    _meet_one_infinity(mesh, copies)
    _refuse(mesh, copies)
    torch.distributed.destroy_process_group()
    hvd.shutdown()
    return *found, _run_sample()


def _run_sample() -> list[Any]:
    """The sample of the page, which cuts its model only where there are four ranks."""
    (code,) = [code for code, _ in blocks(PAGE, "python") if "fully_shard(" in code]
    sample: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), sample)
    assert sample["parts"] == 2
    assert sample["model"][0].weight.to_local().shape == (16, 8)
    return [weight.tolist() for weight in sample["weights"]]


def test_two_copies_in_two_parts_each(tmp_path: Path):
    def environment(rank: int) -> dict[str, str]:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return {"RANK": str(rank), "WORLD_SIZE": "4", **address}

    with reserved_port() as port:
        results = run_ranks(_job, 4, str(tmp_path), env=environment)
    for trained, broadcast, sample in results:
        assert sample == results[0][2]
        assert broadcast == [True] * 7
        for name, (is_close, weights) in trained.items():
            assert is_close, name
            assert weights == results[0][0][name][1], f"ranks differ: {name}"


# -- who sends what ----------------------------------------------------------------------------


def _holding(mesh: tuple[int, ...], index: int, rows: int = 2) -> Holding:
    return Holding(mesh, (("S(0)", len(mesh), index),), (rows, 3))


def _part(count: int, index: int) -> Any:
    return (("S(0)", count, index),)


def test_parts_come_from_the_copy_of_the_root():
    holdings = [_holding((0, 1), 0), _holding((0, 1), 1), _holding((2, 3), 0), _holding((2, 3), 1)]
    assert find_sources("w", holdings, 0) == {_part(2, 0): 0, _part(2, 1): 1}
    assert find_sources("w", holdings, 3) == {_part(2, 0): 2, _part(2, 1): 3}


def test_the_only_copy_is_sent_nowhere():
    assert find_sources("w", [_holding((0, 1, 2), index) for index in range(3)], 1) == {}


def test_copies_that_are_cut_differently_are_refused():
    holdings = [_holding((0, 1), 0), _holding((0, 1), 1), _holding((2,), 0, 4)]
    with pytest.raises(ValueError, match="rank 2 holds a part of 'w' that no rank"):
        find_sources("w", holdings, 0)
    uneven = [_holding((0, 1), 0), _holding((0, 1), 1), _holding((2, 3), 0, 1)]
    with pytest.raises(ValueError, match="rank 2 holds"):
        find_sources("w", uneven, 0)
