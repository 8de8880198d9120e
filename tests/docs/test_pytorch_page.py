"""docs/pytorch.md: what it tells people to write runs, and does what the page says."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.docs.pages import NO_GPU, check_commands, check_links
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def _checksum(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _run_page(rank: int, size: int, page: str, folder: str) -> list[dict[str, Any]]:
    """Run the page's blocks as one program; what it has come to after each of them."""
    os.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "page"}
    states = []
    for found in re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        # Blank lines before the code: tracebacks point into the page.
        lines_before = page[: found.start(1)].count("\n")
        exec(compile("\n" * lines_before + found[1], str(PAGE), "exec"), namespace)
        section = re.findall(r"^## (.*)$", page[: found.start()], re.MULTILINE)[-1]
        plain = {key: v for key, v in namespace.items() if isinstance(v, (int, float, str))}
        states.append({"section": section, "checksum": _checksum(namespace["model"]), **plain})
    hvd.shutdown()
    return states


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[dict[str, Any]]], Path]:
    folder = tmp_path_factory.mktemp("page")
    env = {"HOROVOD_TIMELINE": "DYNAMIC", **NO_GPU}  # as the page says
    return run_ranks(_run_page, 2, PAGE.read_text(), str(folder), env=env, timeout=240), folder


def test_every_block_leaves_the_ranks_with_the_same_model(ran):
    (first, second), _ = ran
    assert len(first) == PAGE.read_text().count("```python") > 10
    for mine, other in zip(first, second, strict=True):
        assert mine["checksum"] == other["checksum"], mine["section"]


def test_the_blocks_run_on_one_process_too(tmp_path: Path):
    env = {"HOROVOD_TIMELINE": "DYNAMIC", **NO_GPU}
    ((states),) = run_ranks(_run_page, 1, PAGE.read_text(), str(tmp_path), env=env, timeout=240)
    assert len(states) == PAGE.read_text().count("```python")


def test_every_training_section_changes_the_model(ran):
    (states, _), _ = ran
    trains = {"Accumulating gradients", "Clipping", "Mixed precision", "Sending fewer bytes"}
    trains |= {"Sparse gradients", "Batch normalisation", "Uneven data"}
    changed = {
        after["section"]
        for before, after in itertools.pairwise(states)
        if after["checksum"] != before["checksum"]
    }
    assert changed >= trains


def test_the_script_learns_and_its_checkpoint_brings_it_back(ran):
    (states, other), _ = ran
    script, _, counted, resumed = states[:4]
    assert counted["accuracy"] > 0.9
    assert counted["accuracy"] == other[2]["accuracy"]
    assert resumed["first_epoch"] == other[3]["first_epoch"] == 3
    assert resumed["checksum"] == script["checksum"]  # of a new model that rank 0 has filled


def test_uneven_data_end_with_the_rank_that_had_most(ran):
    for states in ran[0]:
        assert next(s["last"] for s in states if s["section"] == "Uneven data") == 1


def test_the_timeline_has_what_was_recorded(ran):
    _, folder = ran
    events = json.loads((folder / "timeline.json").read_text())
    names = {event.get("args", {}).get("name") for event in events}
    assert "allreduce.something to see" in names


def test_commands_are_ones_that_horovodrun_understands():
    check_commands(PAGE, 2)


def test_links_lead_somewhere():
    check_links(PAGE)
