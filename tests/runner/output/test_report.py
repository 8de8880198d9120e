"""Whom the report blames, and with which words."""

from __future__ import annotations

import signal

from horovod.runner.output.lines import Line
from horovod.runner.output.report import (
    CauseFinder,
    Exit,
    LostHost,
    Outcome,
    Tail,
    describe_failure,
    exit_status,
    first_to_fail,
    format_ranks,
)


def test_nobody_is_blamed_when_all_is_well():
    assert first_to_fail([Exit(0, 10, 0), Exit(1, 11, 0)]) is None
    assert describe_failure(Outcome(exits=[Exit(0, 10, 0)]), []) == ""
    assert exit_status(Outcome()) == 0


def test_of_ranks_found_dead_together_the_killed_one_comes_first():
    raised, killed, aborted = Exit(0, 10, 1), Exit(2, 12, -9), Exit(1, 11, -6)
    assert first_to_fail([Exit(3, 13, 0), raised, aborted, killed]) is killed
    assert first_to_fail([raised, aborted]) is raised


def test_of_ranks_that_name_each_other_one_is_blamed_and_not_who_names_them():
    """The connection between ranks 1 and 2 is cut, and rank 3 has heard of it from rank 1."""
    third = Exit(3, 13, 1, because_of=(1,))
    ends = [Exit(1, 11, 1, because_of=(2,)), Exit(2, 12, 1, because_of=(1,))]
    cause = CauseFinder()
    cause.add([third])
    assert cause.first() is third
    cause.add(ends)
    assert cause.first() in ends
    cause.add([Exit(0, 10, 1)])
    assert cause.first() == Exit(0, 10, 1)


def test_a_rank_that_hung_for_a_while_is_blamed_though_it_names_one_that_waited():
    waited = [Exit(rank, rank, 1, because_of=(2,)) for rank in (0, 1)]
    hung = Exit(2, 12, 1, because_of=(0,))
    cause = CauseFinder()
    cause.add([*waited, hung])
    assert cause.first() is hung


def test_exit_status():
    assert exit_status(Outcome(first_failure=Exit(0, 10, 3), interrupted=signal.SIGINT)) == 3
    assert exit_status(Outcome(first_failure=Exit(0, 10, -11))) == 139
    assert exit_status(Outcome(interrupted=signal.SIGTERM)) == 143
    assert exit_status(Outcome(problem="no agent")) == 1
    assert exit_status(Outcome(output_lost=True)) == 141


def test_the_report_names_the_first_failure_and_only_its_consequences():
    first = Exit(1, 4242, -int(signal.SIGSEGV), "node7")
    outcome = Outcome(
        exits=[first, Exit(0, 1, 1), Exit(2, 2, -15), Exit(3, 3, -9), Exit(4, 4, 0)],
        first_failure=first,
    )
    text = describe_failure(outcome, ["boom"], "logs/rank.1/stderr")
    assert text.lstrip().startswith(
        "Horovod detected that one or more processes exited with non-zero status"
    )
    assert "1     node7  4242  killed by SIGSEGV (exit code 139)" in text
    assert "  boom\n" in text
    assert "logs/rank.1/stderr" in text
    assert "Rank 0 failed after it" in text


def test_a_silent_kill_gets_a_hint():
    first = Exit(0, 1, -9)
    text = describe_failure(Outcome(exits=[first], first_failure=first), [])
    assert "wrote nothing to stderr" in text
    assert "out of memory" in text


def test_memory_is_no_suspect_where_the_launcher_knows_better():
    first = Exit(0, 1, -9, loss="lost with its host")
    text = describe_failure(Outcome(exits=[first], first_failure=first), [])
    assert "lost with its host" in text
    assert "SIGKILL" not in text
    assert exit_status(Outcome(exits=[first], first_failure=first)) == 137


def test_a_lost_host_is_named_with_its_ranks_and_the_words_of_ssh():
    lost = LostHost("node7", [3, 4, 5], "lost: ssh ended with exit code 255", "Broken pipe")
    outcome = Outcome(exits=[Exit(0, 1, 1)], lost=lost)
    text = describe_failure(outcome, [])
    assert "3-5   node7  -    lost: ssh ended with exit code 255\n" in text
    assert "\n  Broken pipe\n" in text
    assert "Rank 0 failed after it" in text
    assert exit_status(outcome) == 1


def test_ranges():
    assert format_ranks([5, 0, 1, 2]) == "0-2,5"
    assert format_ranks([7]) == "7"


def lines(*texts: str, end: bytes = b"\n") -> list[Line]:
    return [Line(text.encode(), end) for text in texts]


def test_the_tail_is_short_unless_a_traceback_is_long():
    tail = Tail()
    tail.add(lines(*(f"noise {n}" for n in range(300))))
    assert tail.lines() == [f"noise {n}" for n in range(270, 300)]
    tail.add(lines("Traceback (most recent call last):", *(f"  frame {n}" for n in range(60))))
    tail.add(lines("ValueError: bad", "", ""))
    shown = tail.lines()
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[-1] == "ValueError: bad"
    assert len(shown) == 62


def test_the_tail_skips_progress_bars_and_bounds_lines():
    tail = Tail()
    tail.add(lines("10%", "20%", end=b"\r"))
    tail.add(lines("x" * 100_000))
    (line,) = tail.lines()
    assert len(line) == 2000
