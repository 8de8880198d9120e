"""What Perfetto and chrome://tracing require of a trace, as a check. Used by tests of merging."""

from __future__ import annotations

from typing import Any


def check(events: list[dict[str, Any]]) -> None:
    """Raise AssertionError where a merged trace is not a valid one."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert processes == {pid for pid, _ in named}
    assert 0 not in processes, "Perfetto takes process 0 for the idle one"
    timed = [event for event in events if event["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [e for e in events if e["ph"] == "M"]
    stamps = [event["ts"] for event in timed]
    assert stamps == sorted(stamps)
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in timed:
        assert event["ph"] in ("X", "i", "s", "f")
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert (event["pid"], event["tid"]) in named
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        _check_nesting(row)
    _check_arrows(timed, rows)


def _check_nesting(row: list[dict[str, Any]]) -> None:
    """Slices of a row contain each other or do not touch, and come in that order."""
    ends: list[int] = []
    for event in row:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1], event
            ends.append(event["ts"] + event["dur"])


def _check_arrows(timed: list[dict[str, Any]], rows: dict[Any, list[dict[str, Any]]]) -> None:
    begins = {e["id"]: e for e in timed if e["ph"] == "s"}
    ends = {e["id"]: e for e in timed if e["ph"] == "f"}
    arrows = [event for event in timed if event["ph"] in ("s", "f")]
    assert begins.keys() == ends.keys()
    assert len(arrows) == len(begins) + len(ends)
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert (begin["pid"], begin["tid"]) != (end["pid"], end["tid"])
        assert end["bp"] == "e"
    for arrow in arrows:  # each belongs to a slice that is there at its time
        around = rows[arrow["pid"], arrow["tid"]]
        assert any(
            e["ph"] == "X" and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"] for e in around
        ), arrow
