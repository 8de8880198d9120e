"""Docstrings of the public functions and classes, and their place in the API reference."""

from __future__ import annotations

import importlib

import pytest

from horovod.lightning.base import HorovodBase
from horovod.torch.optimizers.options import TorchOptions
from tests.bindings.options import not_in
from tests.docs.docstrings import missing_in_reference, problems

MODULES = {
    "horovod.lightning": "lightning",
    "horovod.lightning.elastic": "elastic",
}


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_is_explained(name: str):
    assert problems(importlib.import_module(name)) == []


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_is_complete(name: str):
    assert missing_in_reference(importlib.import_module(name), MODULES[name]) == set()


def test_the_record_of_options_has_all_arguments():
    assert not_in(TorchOptions, HorovodBase.__init__) == {"self", "join", "lightning"}
