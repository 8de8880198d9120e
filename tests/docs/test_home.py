"""docs/index.md: what it promises is measured, and its sample for PyTorch runs.

The samples for TensorFlow, Keras, JAX and Lightning run in their own folders.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.docs.pages import HOME, check_home_sample, prose, tabs

ROOT = Path(__file__).resolve().parents[2]


def test_the_sample_for_pytorch():
    check_home_sample("PyTorch")


def test_every_sample_is_run_by_a_test():
    run = [
        name
        for tests in ROOT.glob("tests/*/test_*.py")
        for name in re.findall(r'^    check_home_sample\("(\w+)"', tests.read_text(), re.MULTILINE)
    ]
    assert sorted(run) == sorted(tabs(HOME))
    assert len(run) == 5


def test_its_numbers_are_those_of_the_benchmarks():
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    (part,) = re.findall(r'<div class="numbers" markdown>(.*?)</div>', prose(HOME), re.DOTALL)
    numbers = re.findall(r"\d+\.\d+", part)
    assert len(numbers) == 6
    assert [number for number in numbers if number not in measured] == []


def test_its_title_is_not_the_name_of_the_site_twice():
    _, head, _ = HOME.read_text().split("---\n", 2)
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["site_name"] not in yaml.safe_load(head)["title"]
