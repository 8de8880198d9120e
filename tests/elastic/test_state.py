"""States: what is saved, restored and synchronised, and the loop around the training function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, TorchState
from horovod.torch.elastic import state as torch_state
from tests.ranks import RankPool, run_ranks


def test_the_names_that_scripts_use():
    assert set(hvd.elastic.__all__) == {"ElasticSampler", "TorchState", "run"}
    for name in (
        "ElasticSampler",
        "ModelStateHandler",
        "OptimizerStateHandler",
        "SamplerStateHandler",
        "StateHandler",
        "TorchState",
        "get_handler_registry",
        "set_handler_registry",
    ):
        assert hasattr(torch_state, name)
    assert [kind for kind, _ in torch_state.get_handler_registry()] == [
        torch.nn.Module,
        torch.optim.Optimizer,
        ElasticSampler,
    ]


def _object_state(**values: Any) -> ObjectState:
    return ObjectState(lambda obj, root_rank=0: obj, lambda: 0, **values)


def test_object_state():
    state = _object_state(epoch=1, batch=2)
    state.epoch = 5
    state.restore()
    assert (state.epoch, state.batch) == (1, 2)
    state.batch = 7
    state.save()
    state.batch = 8
    state.sync()  # sends what was saved last
    assert state.batch == 7


class _Recorder(State):
    """Writes down what the loop does with it."""

    def __init__(self) -> None:
        super().__init__(lambda obj: obj, lambda: 0)
        self.events: list[str] = []

    def save(self) -> None:
        self.events.append("save")

    def restore(self) -> None:
        self.events.append("restore")

    def sync(self) -> None:
        self.events.append("sync")

    def reset(self) -> None:
        self.events.append("reset")


def test_reset_callbacks_run_after_the_state_has_been_reset():
    state = _Recorder()
    state.register_reset_callbacks([lambda: state.events.append("callback")])
    state.on_reset()
    assert state.events == ["reset", "callback"]


def test_a_notice_interrupts_at_the_next_check():
    state = _Recorder()
    state.check_host_updates()
    state.on_hosts_updated(1.0, 2)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is False
    state.check_host_updates()
    assert state.events == ["save"]


def test_without_an_elastic_launcher_it_is_a_plain_call():
    state = _Recorder()
    run = run_fn(lambda state, a, b=0: a + b, lambda: state.events.append("engine"))
    assert run(state, 1, b=2) == 3
    assert state.events == ["sync"]


def test_without_an_elastic_launcher_a_failure_is_the_end_and_says_so():
    def fail(state: State) -> None:
        raise HorovodInternalError("rank 1 has died")

    with pytest.raises(HorovodInternalError, match=r"rank 1 has died .*not elastic.*--min-np"):
        run_fn(fail, lambda: None)(_Recorder())


def test_a_notice_without_an_elastic_launcher_begins_again():
    state, calls = _Recorder(), []

    def train(state: State) -> str:
        if not calls:
            calls.append(1)
            state.on_hosts_updated(1.0, 2)
            state.check_host_updates()
        return "done"

    assert run_fn(train, lambda: state.events.append("engine"))(state) == "done"
    assert state.events == ["sync", "save", "engine", "reset", "sync"]


def test_notices_wait_where_scripts_look_for_them():
    state = _Recorder()
    state.on_hosts_updated(1.0, 2)
    assert state._host_messages.qsize() == 1
    state._host_messages.put((2.0, 1))
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    assert state._host_messages.empty()
    state.check_host_updates()
    state.on_hosts_updated(3.0, 2)
    state.on_reset()
    state.check_host_updates()


def test_other_errors_are_the_users():
    def fail(state: State) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        run_fn(fail, lambda: None)(_Recorder())


# -- TorchState ----------------------------------------------------------------------------------


def _model(value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    states = [value for entry in optimizer.state.values() for value in entry.values()]
    tensors = [*model.state_dict().values(), *states]
    return [x for t in tensors for x in torch.as_tensor(t).double().view(-1).tolist()]


def _restore_and_train_on() -> None:
    hvd.init()
    model = _model(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = TorchState(model, optimizer, epoch=0)
    fresh = _flat(model, optimizer)
    _step(model, optimizer)
    state.epoch = 1
    state.commit()
    committed = _flat(model, optimizer)
    for _ in range(2):  # training after a restore must not change the snapshot
        _step(model, optimizer)
        state.epoch = 9
        assert _flat(model, optimizer) != committed
        state.restore()
        assert _flat(model, optimizer) == committed
        assert state.epoch == 1
    other = _model(5.0)
    state.model = other  # looked after from now on, and in the snapshot
    _step(other, torch.optim.SGD(other.parameters(), lr=1.0))
    state.restore()
    assert other[0].weight[0, 0] == 5.0
    assert fresh != committed


def test_restoring_brings_everything_back_as_often_as_needed():
    run_ranks(_alone, 1, _restore_and_train_on)


def _alone(rank: int, size: int, function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def _synchronise() -> list[Any]:
    rank = hvd.rank()
    model = _model(float(rank))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        _step(model, optimizer)  # the others have no optimizer state yet
    sampler = ElasticSampler(range(20))
    for _ in range(rank + 1):
        sampler.record_batch(0, 2)
    state = TorchState(model, optimizer, sampler=sampler, batch=rank, nothing=None)
    state.sync()
    after = _flat(model, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    _step(model, optimizer)
    state.batch = 100
    state.restore()  # to what was synchronised, without any commit
    assert _flat(model, optimizer) == after
    return [after, lr, sampler.processed_num, len(sampler), state.batch]


def test_all_ranks_get_the_state_of_rank_0(pool2: RankPool):
    first, second = pool2.run(_synchronise)
    assert first == second
    assert first[1:] == [0.1, 4, 8, 0]


def _gather() -> list[int]:
    sampler = ElasticSampler(range(12), shuffle=False)
    sampler.record_indices(list(sampler)[: 1 + hvd.rank()])
    TorchState(sampler=sampler).gather()
    sampler.reset()
    return sampler.remaining_indices


def test_before_ranks_go_the_others_learn_what_they_have_processed(pool2: RankPool):
    assert pool2.run(_gather) == [[2, 4, 5, 6, 7, 8, 9, 10, 11]] * 2


class _Counter:
    count = 0


class _CounterHandler(torch_state.StateHandler):
    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        self.value.count = hvd.broadcast_object(self.value.count)
        self.save()


def _with_own_handler() -> int:
    registry = torch_state.get_handler_registry()
    torch_state.set_handler_registry([*registry, (_Counter, _CounterHandler)])
    try:
        state = TorchState(counter=_Counter())
    finally:
        torch_state.set_handler_registry(registry)
    state.counter.count = 1 + hvd.rank()
    state.save()
    state.counter.count = 50
    state.restore()
    state.sync()
    with pytest.raises(ValueError, match=r"state\.counter has a _CounterHandler"):
        state._content()
    return int(state.counter.count)


def test_the_registry_can_be_extended(pool2: RankPool):
    assert pool2.run(_with_own_handler) == [1, 1]


# -- on disk -------------------------------------------------------------------------------------


def _train_with_checkpoints(rank: int, size: int, folder: str, start: float) -> Any:
    hvd.init()
    model = _model(start + rank)
    optimizer = torch.optim.Adam(model.parameters())
    sampler = ElasticSampler(range(40))
    state = TorchState(model, optimizer, checkpoint_dir=folder, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state: Any) -> Any:
        begun = state.epoch, sampler.processed_num, _flat(model, optimizer)
        for _ in range(3):
            _step(model, optimizer)
            sampler.record_batch(0, 2)
            state.epoch += 1
            state.commit()
        end = state.epoch, sampler.processed_num, _flat(model, optimizer)
        _step(model, optimizer)  # never committed
        return begun, end

    return train(state)


def test_the_next_job_goes_on_from_the_last_commit(tmp_path: Path):
    (_, first_end), _ = run_ranks(_train_with_checkpoints, 2, str(tmp_path), 1.0)
    assert 1 <= len(list(tmp_path.iterdir())) <= 2
    (tmp_path / "commit-99.pt").write_bytes(b"damaged")
    for begun, end in run_ranks(_train_with_checkpoints, 2, str(tmp_path), 50.0):
        assert begun == first_end
        assert end[:2] == (6, 24)


def _with_another_model(rank: int, size: int, folder: str) -> str:
    hvd.init()
    state = TorchState(torch.nn.Linear(7, 7), checkpoint_dir=folder)
    with pytest.raises(ValueError) as caught:
        state.sync()
    with pytest.raises(ValueError, match=r"state\['path'\] is a PosixPath"):
        TorchState(path=Path(), checkpoint_dir=folder)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    run_ranks(_train_with_checkpoints, 1, str(tmp_path), 1.0)
    (message,) = run_ranks(_with_another_model, 1, str(tmp_path))
    assert ".pt does not fit this state" in message
