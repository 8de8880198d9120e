"""docs/process.md: what `init` changes in a process, and that each knob forbids it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd
from horovod.common.config import KNOBS
from horovod.engine import runtime as runtime_module
from horovod.torch.gradients import step_log
from horovod.transport.host import shared_memory
from tests.docs.pages import check_links
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "process.md"
FORBIDDEN = {
    "HOROVOD_SHM_PEER_MEMORY": "0",
    "HOROVOD_KEEP_HEAP": "0",
    "HOROVOD_HUGE_PAGES": "0",
}


def _changes(rank: int, size: int) -> tuple[list[str], float]:
    """Which of our calls to the system are made, noted where they are made."""
    made: list[str] = []
    shared_memory.allow_peers = lambda pids: made.append(f"open to {len(list(pids))}")
    runtime_module.keep_heap = lambda: made.append("keep the heap")
    step_log.join_pages = lambda: made.append("huge pages")
    hvd.init()
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    total = hvd.allreduce(torch.ones(500_000), op=hvd.Sum)  # large: directly, or staged
    return sorted(set(made)), total.mean().item()


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, ["huge pages", "keep the heap", "open to 1"]), (FORBIDDEN, [])],
    ids=["by default", "forbidden"],
)
def test_knobs_forbid_what_init_changes(env: dict[str, str], expected: list[str]):
    assert run_ranks(_changes, 2, env=env) == [(expected, 2.0)] * 2


def test_the_page_names_knobs_that_exist():
    known = {knob.env for knob in KNOBS}
    named = set(re.findall(r"`(HOROVOD_[A-Z_]+)=", PAGE.read_text()))
    assert set(FORBIDDEN) <= named <= known
    check_links(PAGE)
