"""A rank that does not come: reported with names and source lines, ended only if asked to."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.faults import TRANSPORTS
from tests.ranks import listen, start_ranks, tell

LATE = 1
QUICK = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
MARK = "the line that waits"


def _line_that_waits() -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, text in enumerate(lines, 1) if text.endswith(f"# {MARK}"))


def _one_is_late(rank: int, size: int) -> float:
    hvd.init()
    hvd.allreduce(torch.ones(1), name="warm up")
    tell("in place")
    if rank == LATE:
        listen()
    total = hvd.allreduce(torch.ones(3), name="grad/ünï", op=hvd.Sum)  # the line that waits
    return total[0].item()


def _check_report(output: str) -> None:
    assert re.search(rf"[Mm]issing ranks?.*\b{LATE}\b", output, re.DOTALL), output
    assert "grad/ünï" in output
    assert f"{Path(__file__).name}:{_line_that_waits()}" in output, output


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "busy elsewhere"])
def test_a_late_rank_is_reported_and_nothing_is_lost(transport: str, stopped: bool):
    with start_ranks(_one_is_late, 2, env=TRANSPORTS[transport] | QUICK) as ranks:
        for rank in range(2):
            ranks.heard(rank)
        if stopped:
            ranks.signal(LATE, signal.SIGSTOP)
        advice = "set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
        _check_report(ranks.wait_for_output(0, f"grad/ünï.*py:[0-9].*{advice}"))
        ranks.signal(LATE, signal.SIGCONT)
        ranks.say()
        assert ranks.results() == [2.0, 2.0]


def _one_never_comes(rank: int, size: int) -> str:
    hvd.init()
    tell("in place")
    if rank == LATE:
        listen()
    try:
        hvd.allreduce(torch.ones(3), name="x")
        # The late rank may still find what the others brought before they gave up.
        hvd.allreduce(torch.ones(3), name="y")
    except HorovodInternalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "busy elsewhere"])
def test_with_a_shutdown_time_everybody_gets_an_error(transport: str, stopped: bool):
    env = TRANSPORTS[transport] | QUICK | {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    with start_ranks(_one_never_comes, 2, env=env) as ranks:
        for rank in range(2):
            ranks.heard(rank)
        if stopped:
            ranks.signal(LATE, signal.SIGSTOP)
        (waiting,) = ranks.wait(ranks=[0])
        assert waiting.error is None, waiting.describe()
        assert re.search(r"stall", waiting.result, re.IGNORECASE), waiting.result
        ranks.signal(LATE, signal.SIGCONT)
        ranks.say()
        (late,) = ranks.wait(ranks=[LATE])
        assert late.error is None, late.describe()
        assert late.result


def test_no_report_when_switched_off():
    env = QUICK | {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_LOG_LEVEL": "warning"}
    with start_ranks(_one_is_late, 2, env=env) as ranks:
        for rank in range(2):
            ranks.heard(rank)
        with pytest.raises(AssertionError, match=r"waited 2\.5 s"):
            ranks.wait_for_output(0, "issing", timeout=2.5)
        ranks.say()
        assert ranks.results() == [2.0, 2.0]
