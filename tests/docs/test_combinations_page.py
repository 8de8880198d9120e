"""The page about what to combine Horovod with: its programs run on two ranks, and come to what one
process comes to.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.docs.pages import NO_GPU, blocks
from tests.ports import reserved_port
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
NEEDED = {
    "StatefulDataLoader": "torchdata",
    "Hugging Face Trainer": "transformers",
    "Accelerate": "accelerate",
    "fully_shard (FSDP2)": "torch.distributed.fsdp._fully_shard",  # torch 2.6
}


def _title(line: int) -> str:
    """The title of the section that has this line."""
    above = "\n".join(PAGE.read_text().splitlines()[:line])
    return re.findall(r"^## (.*)$", above, re.MULTILINE)[-1]


SECTIONS = [_title(line) for _, line in blocks(PAGE, "python")]


def _missing(title: str) -> str | None:
    module = NEEDED.get(title)
    if module is None or importlib.util.find_spec(module) is not None:
        return None
    return module


def _run_sections(rank: int, size: int, folder: str) -> dict[str, dict[str, Any]]:
    os.chdir(folder)
    environ = dict(os.environ)
    found = {}
    for code, line in blocks(PAGE, "python"):
        title = _title(line)
        if _missing(title) is not None:
            continue
        os.environ.update(environ)
        namespace: dict[str, Any] = {"__name__": "page"}
        exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
        if title in REFERENCES:
            namespace["start"], namespace["expected"] = REFERENCES[title](namespace)
        if "trainer" in namespace:
            namespace["resumed"] = _trainer_resumed(namespace)
        hvd.shutdown()
        if "weights" not in namespace and "model" in namespace:
            namespace["weights"] = _weights(namespace["model"])
        wanted = ("weights", "start", "expected", "resumed", "kept", "loss")
        found[title] = {key: namespace[key] for key in wanted if key in namespace}
    return found


# -- the same by one process ---------------------------------------------------------------------


Weights = list[torch.Tensor]


def _weights(model: torch.nn.Module) -> Weights:
    return [param.detach().clone() for param in model.parameters()]


def _flat(weights: Weights) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in weights])


def _trainer_alone(sample: dict[str, Any]) -> tuple[Weights, Weights]:
    """A Trainer that has all of the data, and clips by itself."""
    torch.manual_seed(0)  # rank 0's
    model = type(sample["model"])(sample["model"].config)
    start = _weights(model)

    class InOrder(sample["Trainer"]):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(sample["texts"])

    trainer = InOrder(
        model=model,
        args=sample["TrainingArguments"](
            output_dir="alone",
            num_train_epochs=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=sample["ACCUMULATED"],
            max_grad_norm=0.5,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
        ),
        train_dataset=sample["texts"],
        optimizers=(torch.optim.AdamW(model.parameters(), lr=0.01), None),
    )
    trainer.train()
    return start, _weights(model)


def _trainer_resumed(sample: dict[str, Any]) -> Weights:
    """Another Trainer, which goes on from the checkpoint in the middle of the sample's run."""
    hvd.barrier()  # rank 0 has written
    model = type(sample["model"])(sample["model"].config)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        backward_passes_per_step=sample["ACCUMULATED"],
    )
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) and None
    )
    trainer = sample["HorovodTrainer"](
        model=model,
        args=replace(sample["trainer"].args, save_strategy="no", logging_strategy="no"),
        train_dataset=sample["texts"],
        optimizers=(optimizer, None),
        callbacks=[sample["EqualStart"]()],
    )
    trainer.train(resume_from_checkpoint="trained/checkpoint-2")
    return _weights(model)


def _accelerated_alone(sample: dict[str, Any]) -> tuple[Weights, Weights]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    start = _weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in sample["inputs"].split(16):
        optimizer.zero_grad()
        (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return start, _weights(model)


REFERENCES = {"Hugging Face Trainer": _trainer_alone, "Accelerate": _accelerated_alone}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, dict[str, Any]]], Path]:
    folder = tmp_path_factory.mktemp("combinations")

    def environment(rank: int) -> dict[str, str]:
        # As horovodrun sets them. Nothing may be downloaded.
        for_torch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return {**NO_GPU, **for_torch, **address, "HF_HUB_OFFLINE": "1"}

    with reserved_port() as port:
        return run_ranks(_run_sections, 2, str(folder), env=environment, timeout=240), folder


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section(ran, title: str):
    missing = _missing(title)
    if missing is not None:
        pytest.skip(f"{missing} is not there")
    (first, second), _ = ran
    mine, theirs = first[title].get("weights", []), second[title].get("weights", [])
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other), "the ranks ended with different parameters"
    if title in REFERENCES:
        # Adam makes of a gradient that is nearly zero a step of any size, as it was rounded. So
        # this looks at all weights together.
        reached, expected = _flat(mine), _flat(first[title]["expected"])
        start = _flat(first[title]["start"])
        assert (reached - expected).norm() < 1e-3 * (expected - start).norm()


def test_what_the_page_says_of_the_results(ran):
    (first, second), folder = ran
    sharded = "Muon and Adafactor"
    if hasattr(torch.optim, "Muon"):
        assert [found[sharded]["kept"] for found in (first, second)] == [1, 1]
    assert first["LBFGS"]["loss"] < 1e-6
    if "Accelerate" in first:
        assert len(torch.load(folder / "accelerated.pt")) == 4
    if "Hugging Face Trainer" in first:  # one rank has saved
        assert sorted(os.listdir(folder / "trained")) == ["checkpoint-2", "checkpoint-4"]
        for found in (first, second):
            trained = found["Hugging Face Trainer"]
            assert torch.equal(_flat(trained["resumed"]), _flat(trained["weights"]))
