"""docs/tensorflow.md: what it tells people to write runs, and does what the page says.

The code of docs/keras.md runs in tests/keras; its commands and links are looked at here.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from horovod.runner.options.arguments import parse_args
from tests.docs.pages import check_home_sample
from tests.tensorflow.pages import DOCS, run_page, sections_that_train

PAGES = ["tensorflow.md", "keras.md"]


def test_the_tensorflow_page(tmp_path: Path):
    states, other = run_page("tensorflow.md", tmp_path, {})
    assert sections_that_train(states) >= {
        "Eager, graphs and XLA",
        "Accumulating gradients",
        "Clipping",
        "Mixed precision",
        "Sending fewer bytes",
        "Sparse gradients",
        "Batch normalisation",
        "Uneven data",
    }
    metrics, resumed = (state for state in states if state["section"] == "Metrics and checkpoints")
    assert metrics["accuracy"] > 0.9
    assert metrics["accuracy"] == other[2]["accuracy"]
    assert resumed["checksum"] == metrics["checksum"]  # of a new model that rank 0 has filled
    assert resumed["steps_done"] == 4 * 8  # epochs of 512 / 2 / 32 steps
    sections = {state["section"]: state for state in states}
    assert sections["Uneven data"]["last"] == 1
    assert sections["Process sets"]["total"] == 1


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_ones_that_horovodrun_understands(name: str):
    page = (DOCS / name).read_text()
    commands = re.findall(r"^    (?:KERAS\S+ )?(horovodrun .*)$", page, re.MULTILINE)
    assert commands
    for command in commands:
        assert parse_args(shlex.split(command)[1:]).num_proc == 2


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str):
    for target in re.findall(r"\]\(([^)]+)\)", (DOCS / name).read_text()):
        path, _, anchor = target.partition("#")
        file = DOCS / (path or name)
        assert file.is_file(), target
        titles = re.findall(r"^## (.*)$", file.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^a-z_ ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, target


def test_the_sample_of_the_home_page():
    check_home_sample("TensorFlow")
