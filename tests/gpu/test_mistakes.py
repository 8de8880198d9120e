"""Programs and machines that are not as they should be: said by name, on all ranks, in seconds."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.accelerators import gpu_count, nccl_environment, on_cpu, own_device
from tests.gpu import JOBS, LIMIT, SOON
from tests.gpu.pools import GpuPools
from tests.ranks import listen, run_ranks, start_ranks, tell

SIZE = 3
ODD = 1  # the rank that is not like the others

needs_device = pytest.mark.skipif(on_cpu(), reason="needs tensors on a GPU")


# -- which device -------------------------------------------------------------------------------


def without_set_device(rank: int, size: int) -> list[Any]:
    """Every rank uses the device that it finds, which is the first one."""
    hvd.init()
    model = nn.Linear(20, 3).cuda()
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 20), float(rank), device="cuda")).sum().backward()
        optimizer.step()
    total = hvd.allreduce(torch.ones(5, device="cuda"), op=hvd.Sum, name="total")
    return [total.tolist(), model.weight.detach().cpu()]


@needs_device
def test_a_program_that_forgets_set_device_is_told_who_shares_what():
    with start_ranks(without_set_device, SIZE) as ranks:
        results = ranks.results(LIMIT)
        output = "".join(ranks.output(rank) for rank in range(SIZE))
    for total, weight in results:
        assert total == [float(SIZE)] * 5
        assert torch.equal(weight, torch.full((3, 20), -3.0 * sum(range(SIZE)) / SIZE))
    lines = [line for line in output.splitlines() if "cuda:0" in line]
    assert any(re.search(r"ranks 0\D+1\D+2\b", line) for line in lines), output
    assert any("set_device" in line for line in lines), f"what to do: {output}"


def on_the_only_one(rank: int, size: int) -> tuple[float, set[str]]:
    from horovod.engine.runtime import runtime

    hvd.init()
    total = hvd.allreduce(torch.ones(5, device="cuda"), op=hvd.Sum)
    job = runtime._job
    assert job is not None
    used = job.channels[0]._executor._device_transports.values()
    return float(total[0]), {each.name for each in used}


@needs_device
def test_ranks_that_see_one_device_each():
    """All call theirs cuda:0, and they are not the same one, or NCCL is told so."""
    of_rank = nccl_environment(SIZE)

    def environment(rank: int) -> dict[str, str]:
        return of_rank(rank) | {"CUDA_VISIBLE_DEVICES": str(rank % gpu_count())}

    results = run_ranks(on_the_only_one, SIZE, env=environment, timeout=LIMIT)
    assert results == [(float(SIZE), {"NCCL"})] * SIZE


def has_context(number: int) -> bool:
    """Whether this process has a context on that device, as the driver says."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDeviceGet(ctypes.byref(device), number) == 0
    state = driver.cuDevicePrimaryCtxGetState
    assert state(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)


def contexts(rank: int, size: int) -> list[bool]:
    """After a bit of everything: which devices this rank has a context on."""
    chosen = hvd.ProcessSet(list(range(size - 1)))
    hvd.init(process_sets=[chosen])
    device = own_device()
    if chosen.included():
        hvd.allreduce(torch.ones(5, device=device), process_set=chosen)
    model = nn.Linear(20, 3).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model.named_parameters()
    )
    for step in range(3):
        optimizer.zero_grad()
        if step < 2 or rank == 0:
            model(torch.ones(1, 20, device=device)).sum().backward()
            optimizer.step()
    hvd.join()
    hvd.stats()
    return [has_context(number) for number in range(gpu_count())]


@needs_device
def test_no_rank_takes_memory_of_anothers_device():
    if gpu_count() < SIZE:
        pytest.skip(f"needs {SIZE} GPUs")
    results = run_ranks(contexts, SIZE, env=nccl_environment(SIZE), timeout=LIMIT)
    for rank, found in enumerate(results):
        assert found == [number == rank for number in range(gpu_count())]


# -- ranks that differ --------------------------------------------------------------------------


def device_at_hand() -> torch.device:
    if on_cpu():
        return torch.device("cpu")
    return own_device() if torch.cuda.is_available() else torch.device("cpu")


def allreduced() -> None:
    hvd.allreduce(torch.ones(5, device=device_at_hand()), name="x")


def broadcast() -> None:
    hvd.broadcast_parameters(nn.Linear(5, 5).to(device_at_hand()).state_dict(), root_rank=0)


def trained() -> None:
    model = nn.Linear(5, 5).to(device_at_hand())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 5, device=device_at_hand())).sum().backward()
        optimizer.step()


PROGRAMS = (allreduced, broadcast, trained)


def failing(rank: int, size: int) -> list[str]:
    """What the errors of all programs say; a job goes on after such an error."""
    hvd.init()
    found = []
    for program in PROGRAMS:
        try:
            program()
            found.append("")
        except (HorovodInternalError, ValueError) as error:
            found.append(str(error))
    return found


@needs_device
def test_a_rank_without_a_gpu_is_named():
    of_rank = nccl_environment(SIZE)

    def environment(rank: int) -> dict[str, str]:
        return of_rank(rank) | ({"CUDA_VISIBLE_DEVICES": ""} if rank == ODD else {})

    for messages in run_ranks(failing, SIZE, env=environment, timeout=2 * SOON):
        for message in messages:
            assert re.search(rf"\branks? {ODD}\b", message), message
            assert "cpu" in message, message
            assert "cuda" in message, message


def grouped(everywhere: bool) -> str:
    """A group of tensors of which one was left in host memory."""
    device = own_device()
    other = torch.device("meta") if device.type == "cpu" else torch.device("cpu")
    is_odd = everywhere or hvd.rank() == ODD
    group = [torch.ones(3, device=device), torch.ones(3, device=other if is_odd else device)]
    try:
        hvd.grouped_allreduce(group, name="group")
    except (HorovodInternalError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("job", JOBS)
def test_a_group_on_two_devices(gpus: GpuPools, job: str):
    for message in gpus.run(job, grouped, True):
        assert "cpu" in message, message
        assert "cuda:" in message or on_cpu(), message


def grouped_and_left(rank: int, size: int) -> str:
    """The odd rank's error ends its program; the others stay until all have raised."""
    hvd.init()
    message = grouped(everywhere=False)
    tell(message)
    if rank != ODD:
        listen()
    return message


def test_one_ranks_group_on_two_devices():
    """That rank's program ends by its error; the others learn who has gone, and do not wait."""
    with start_ranks(grouped_and_left, SIZE, env=nccl_environment(SIZE)) as ranks:
        assert "cpu" in ranks.heard(ODD, LIMIT)
        for rank in (rank for rank in range(SIZE) if rank != ODD):
            assert f"rank {ODD}" in ranks.heard(rank, SOON)
        ranks.say()
        ranks.wait(SOON)


# -- errors of the device -----------------------------------------------------------------------


def reduced_after_an_assertion(rank: int, size: int, training: bool) -> str:
    """An index out of bounds on one rank: every call to its device fails from then on."""
    hvd.init()
    device = own_device()
    words = nn.Embedding(10, 4).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(words.parameters(), lr=0.1), words.named_parameters()
    )
    for _ in range(3):
        optimizer.zero_grad()
        words(torch.tensor([1, 2], device=device)).sum().backward()
        optimizer.step()
    tell("warmed up")
    index = torch.tensor([10**6 if rank == ODD else 3], device=device)
    try:
        optimizer.zero_grad()
        found = words(index)
        if training:
            found.sum().backward()
            optimizer.step()
        else:
            hvd.allreduce(found.detach(), name="words")
        torch.cuda.synchronize()
        hvd.allreduce(torch.ones(1, device=device), name="after it")
    except Exception as error:  # torch has several kinds
        tell(f"{type(error).__name__}: {error}")
        listen()  # an exit must not be what the others notice
        return "failed"
    return "went on"


@needs_device
@pytest.mark.killing
@pytest.mark.parametrize("training", [False, True])
def test_a_device_side_assertion_on_one_rank(training: bool):
    with start_ranks(
        reduced_after_an_assertion, SIZE, training, env=nccl_environment(SIZE)
    ) as ranks:
        for rank in range(SIZE):
            assert ranks.heard(rank, LIMIT) == "warmed up"
        messages = [ranks.heard(rank, SOON) for rank in range(SIZE)]
        for rank, message in enumerate(messages):
            assert "assert" in message, message
            if rank != ODD:
                assert "HorovodInternalError" in message, message
                assert f"rank {ODD}" in message, message
        ranks.say()  # and a process whose context is broken must end too
        outcomes = ranks.wait(SOON)
        assert [outcome.result for outcome in outcomes] == ["failed"] * SIZE
