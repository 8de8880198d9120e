"""Docstrings of the public functions and classes, and their place in the API reference."""

from __future__ import annotations

import importlib

import pytest

from tests.docs.docstrings import missing_in_reference, problems

MODULES = {
    "horovod.spark": "spark",
    "horovod.spark.common.reading.reader": "spark",
    "horovod.spark.common.store": "spark",
    "horovod.spark.keras": "spark",
    "horovod.spark.lightning": "spark",
    "horovod.spark.torch": "spark",
}


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_is_explained(name: str):
    assert problems(importlib.import_module(name), listed=True) == []


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_is_complete(name: str):
    assert missing_in_reference(importlib.import_module(name), MODULES[name]) == set()
