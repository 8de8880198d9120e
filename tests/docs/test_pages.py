"""The pages about one thing each: their code runs, one page after the other, on two ranks.

Each page is a program of its own. What it promises it asserts itself, where that is worth reading;
the rest is looked at here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.docs.pages import NO_GPU, blocks
from tests.ports import reserved_port
from tests.ranks import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    "getting_started",
    "concepts",
    "process_sets",
    "gpus",
    "fusion",
    "timeline",
    "stats",
    "adasum",
    "compression",
    "slow_links",
    "compile",
    "gradient_accumulation",
    "mixed_precision",
    "checkpoints",
    "sparse",
    "uneven_data",
    "migration",
    "from_ddp",
]
# These have tests of their own.
ELSEWHERE = {"pytorch", "tensorflow", "keras", "lightning", "communication_hooks", "elastic"}
ELSEWHERE |= {"tensorflow_data_service", "launch/laptop", "scaling", "notebooks"}
ELSEWHERE |= {"hyperparameter_search", "combinations"}
# Tests of other parts run these.
LATER = {"spark", "spark_estimators", "ray", "jax", "mxnet", "launch/mpi", "cuda_graphs"}


def _run_pages(rank: int, size: int, folder: str) -> dict[str, dict[str, Any]]:
    """What each page has come to: its numbers, and its tensors as lists."""
    os.chdir(folder)
    found = {}
    for name in PAGES:
        namespace: dict[str, Any] = {"__name__": "page"}
        page = DOCS / f"{name}.md"
        for code, line in blocks(page, "python"):
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        if name == "from_ddp":
            namespace["ddp"] = namespace["train_with_ddp"]()
            namespace["horovod"] = namespace["train_with_horovod"]()
        if isinstance(namespace.get("model"), torch.nn.Module):
            namespace["weights"] = torch.cat([p.flatten() for p in namespace["model"].parameters()])
        hvd.shutdown()
        found[name] = {
            key: value.to_dense().tolist() if isinstance(value, torch.Tensor) else value
            for key, value in namespace.items()
            if isinstance(value, (int, float, str, torch.Tensor))
        }
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, dict[str, Any]]], Path]:
    folder = tmp_path_factory.mktemp("pages")

    def environment(rank: int) -> dict[str, str]:
        # As horovodrun sets them, for the page that uses torch.distributed as well.
        torch_names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        ours = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_GLOO_TIMEOUT_SECONDS": "200"}
        return {"MASTER_PORT": str(port), **NO_GPU, **ours, **torch_names}

    with reserved_port() as port:
        return run_ranks(_run_pages, 2, str(folder), env=environment, timeout=240), folder


def test_every_page_with_code_is_run_by_a_test():
    with_code = {
        str(page.relative_to(DOCS).with_suffix(""))
        for page in DOCS.rglob("*.md")
        if blocks(page, "python")
    }
    assert with_code - LATER == set(PAGES) | ELSEWHERE


@pytest.mark.parametrize(
    "page",
    [
        "getting_started",
        "fusion",
        "adasum",
        "compression",
        "gradient_accumulation",
        "mixed_precision",
        "checkpoints",
    ],
)
def test_training_leaves_the_ranks_with_the_same_model(ran, page: str):
    (first, second), _ = ran
    assert first[page]["weights"] == second[page]["weights"]


def test_uneven_data_ends_with_the_model_of_the_last_rank(ran):
    (first, second), _ = ran
    assert first["uneven_data"]["weights"] == second["uneven_data"]["weights"]
    assert first["uneven_data"]["accuracy"] == pytest.approx(15 / 21)


def test_ddp_and_horovod_come_to_the_same_bits(ran):
    (first, second), _ = ran
    assert first["from_ddp"]["ddp"] == first["from_ddp"]["horovod"]
    assert first["from_ddp"]["horovod"] == second["from_ddp"]["horovod"]


def test_the_timeline_has_what_was_recorded(ran):
    _, folder = ran
    for file in ("part.json", "part.rank1.json"):
        events = json.loads((folder / file).read_text())
        assert "allreduce.something to see" in {e.get("args", {}).get("name") for e in events}
    page = (DOCS / "timeline.md").read_text()
    kinds = {e["name"] for e in events if e.get("ph") == "B"}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= kinds
    assert all(f"`{kind}`" in page for kind in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE"))


def test_a_checkpoint_can_be_used_without_horovod(ran):
    (first, _), folder = ran
    saved = torch.load(folder / "model.pt")
    assert saved["epoch"] == 1
    model = torch.nn.Linear(4, 1)
    model.load_state_dict(saved["model"])
    assert model(torch.ones(1, 4)).tolist() == first["checkpoints"]["answer"]
    assert len(torch.load(folder / "adam.pt")["state"]) == 2
