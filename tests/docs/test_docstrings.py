"""Docstrings of what needs no framework but torch, and their place in the API reference.

TensorFlow, Keras and Lightning have the same test in their own folders.
"""

from __future__ import annotations

import importlib

import pytest

from tests.docs.docstrings import missing_in_reference, problems

MODULES = {
    "horovod": "run",
    "horovod.torch": "torch",
    "horovod.torch.elastic": "elastic",
    "horovod.torch.hooks": "torch",
}


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_is_explained(name: str):
    assert problems(importlib.import_module(name)) == []


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_is_complete(name: str):
    assert missing_in_reference(importlib.import_module(name), MODULES[name]) == set()


def test_a_docstring_that_says_nothing_is_found():
    class Module:
        __all__ = ("work",)

        @staticmethod
        def work(amount: int) -> None:
            """Work hard until done."""

    Module.work.__module__ = "horovod.example"
    assert problems(Module) == ["work does not mention amount"]  # type: ignore[arg-type]
