"""Whose stack is asked for, and how often."""

from __future__ import annotations

from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.processes import AGAIN_SECONDS, StackRequests
from horovod.observe.dashboard.rank import Rank
from horovod.runner.output.watcher import StackRequest


def make(*awaited: int, elastic: bool = False) -> Board:
    board = Board("train.py", 0.0, 1.0, elastic)
    for number in range(8):
        name = f"w{number + 10}" if elastic else str(number)
        board.ranks[number] = Rank(number, name, "a", pid=100 + number, launched=90 + number)
    board.awaited = {number: 5.0 + number for number in awaited}
    return board


def test_ranks_that_others_wait_for_are_asked_now_and_then():
    requests = StackRequests()
    requests.look(make(), 0.0)
    assert requests.take() == []
    requests.look(make(3), 1.0)
    assert requests.take() == [StackRequest(3, 103)]
    requests.look(make(3), AGAIN_SECONDS)
    assert requests.take() == []
    requests.look(make(3), AGAIN_SECONDS + 1)
    assert requests.take() == [StackRequest(3, 103)]


def test_a_few_at_a_time_the_longest_awaited_first():
    requests = StackRequests()
    requests.look(make(*range(8)), 0.0)
    assert [each.worker for each in requests.take()] == [7, 6, 5, 4]


def test_workers_of_an_elastic_job_keep_their_numbers():
    requests = StackRequests()
    requests.look(make(2, elastic=True), 0.0)
    assert requests.take() == [StackRequest(12, 102)]


def test_a_worker_that_this_launcher_has_not_started_is_not_asked():
    board = make(2)
    board.ranks[2].launched = 0
    requests = StackRequests()
    requests.look(board, 0.0)
    assert requests.take() == []
