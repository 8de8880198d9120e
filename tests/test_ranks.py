"""The helper that starts ranks: a test that cannot fail would hide every other failure."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest
import torch

from tests.ranks import PATIENCE, RankPool, run_ranks, start_ranks, tell


def _place(rank: int, size: int, factor: int) -> tuple[int, int, str, str | None, int]:
    environ = os.environ
    return (
        rank * factor,
        size,
        environ["HOROVOD_RANK"] + environ["HOROVOD_SIZE"] + environ["HOROVOD_LOCAL_RANK"],
        environ.get("HOROVOD_CYCLE_TIME"),
        torch.get_num_threads(),
    )


def test_results_come_by_rank_with_the_environment_of_a_worker(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "17")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert run_ranks(_place, 3, 10, env={"HOROVOD_CYCLE_TIME": "5"}) == [
        (0, 3, "030", "5", 1),
        (10, 3, "131", "5", 1),
        (20, 3, "232", "5", 1),
    ]


def _launcher_variables(rank: int, size: int) -> list[str]:
    return [name for name in os.environ if name.startswith("OMPI_COMM")]


def test_another_launcher_around_the_tests_does_not_show(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert run_ranks(_launcher_variables, 1) == [[]]


def _meet(rank: int, size: int) -> bytes:
    from horovod.common.config import Config
    from horovod.common.environments import detect
    from horovod.common.joining.rendezvous import connect

    store = connect(detect(), Config.from_env())
    store.set(f"from {rank}", b"%d" % rank)
    return store.get(f"from {(rank + 1) % size}", timeout=PATIENCE)


def test_ranks_meet_in_their_store():
    assert run_ranks(_meet, 2) == [b"1", b"0"]


def _tensor(rank: int, size: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * rank


def test_tensors_travel_both_ways():
    big = torch.ones(300_000)  # more than a pipe holds
    zeros, ones = run_ranks(_tensor, 2, big)
    assert torch.equal(zeros, torch.zeros_like(big))
    assert torch.equal(ones, big)


def _fail_on_one(rank: int, size: int) -> None:
    print(f"hello from {rank}")
    print(f"oh from {rank}", file=sys.stderr)
    if rank == 1:
        raise KeyError("the reason")


def test_a_failure_shows_traceback_and_output_of_all_ranks(monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE", PATIENCE)  # until rank 0 has said it too
    with pytest.raises(AssertionError) as caught:
        run_ranks(_fail_on_one, 2)
    message = str(caught.value)
    for expected in (
        "_fail_on_one",
        "KeyError: 'the reason'",
        "hello from 0",
        "oh from 0",
        "hello from 1",
        "oh from 1",
    ):
        assert expected in message


def _hang_on_one(rank: int, size: int) -> None:
    tell("here")
    if rank == 1:
        signal.pause()


def test_a_hang_shows_where(monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE", PATIENCE)  # for saying where it is
    with start_ranks(_hang_on_one, 2) as ranks:
        for rank in range(2):
            ranks.heard(rank)
        with pytest.raises(AssertionError, match=r"waited 2 s(.|\n)*in _hang_on_one"):
            ranks.results(timeout=2)


def _exit_badly(rank: int, size: int) -> None:
    os._exit(3 if rank == 0 else 0)


def test_leaving_without_a_result_is_a_failure():
    with pytest.raises(AssertionError, match="exit code 3"):
        run_ranks(_exit_badly, 2)


def _note_and_wait(rank: int, size: int) -> None:
    print("about to wait")
    tell({"rank": rank})
    signal.pause()


def test_ranks_can_be_watched_and_signalled():
    with start_ranks(_note_and_wait, 2) as ranks:
        assert ranks.heard(0) == {"rank": 0}
        assert ranks.heard(1) == {"rank": 1}
        ranks.wait_for_output(1, "about to wait")
        ranks.wait_until_blocked(1)
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.wait(ranks=[1])
        assert outcome.exitcode == -signal.SIGKILL
        assert outcome.error == "ended without returning: killed by SIGKILL"
        assert "about to wait" in outcome.output
        left = ranks.pids[0]
    assert not psutil.pid_exists(left)


def _busy(rank: int, size: int) -> None:
    tell("running")
    while True:
        pass


def test_a_running_rank_is_not_taken_for_blocked():
    with start_ranks(_busy, 1) as ranks:
        ranks.heard(0)
        with pytest.raises(AssertionError, match="to block"):
            ranks.wait_until_blocked(0, timeout=0.5)


def _fork(rank: int, size: int) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    tell(child)


def test_processes_that_a_rank_leaves_behind_end_with_the_block():
    with start_ranks(_fork, 1) as ranks:
        child = ranks.heard(0)
        ranks.wait()
        assert _lives(child)
    deadline = time.monotonic() + PATIENCE
    while _lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- pools ---------------------------------------------------------------------------------------


def _pid_and_place() -> tuple[int, int, int]:
    import horovod.torch as hvd

    return os.getpid(), hvd.rank(), hvd.size()


def _fail_on_rank_1() -> None:
    import horovod.torch as hvd

    print("before the failure")
    if hvd.rank() == 1:
        raise KeyError("the reason")
    hvd.barrier()  # nobody else comes


def _die_on_rank_1() -> None:
    import horovod.torch as hvd

    if hvd.rank() == 1:
        os._exit(5)


def test_a_pool_keeps_its_ranks_until_one_fails(monkeypatch):
    monkeypatch.setattr("tests.ranks.GRACE", 1.0)  # rank 0 really hangs
    pool = RankPool(2)
    try:
        first = pool.run(_pid_and_place)
        assert [place[1:] for place in first] == [(0, 2), (1, 2)]
        assert pool.run(_pid_and_place) == first

        with pytest.raises(AssertionError, match=r"the reason(.|\n)*before the failure"):
            pool.run(_fail_on_rank_1)
        second = pool.run(_pid_and_place)
        assert {place[0] for place in second}.isdisjoint({place[0] for place in first})

        with pytest.raises(AssertionError, match="exit code 5"):
            pool.run(_die_on_rank_1)
        assert [place[1:] for place in pool.run(_pid_and_place)] == [(0, 2), (1, 2)]
    finally:
        pool.close()
