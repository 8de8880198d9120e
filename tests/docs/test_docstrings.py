"""Docstrings of what needs no framework but torch, and their place in the API reference.

The other bindings, Spark and Ray have the same test in their own folders.
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


def test_a_word_about_a_parameter_is_no_entry_in_the_list_of_arguments():
    class Module:
        __all__ = ("work",)

        @staticmethod
        def work(amount: int, **options: object) -> None:
            """Work hard until `amount` is done.

            Args:
                **options: How to work.
            """

    Module.work.__module__ = "horovod.example"
    assert problems(Module, listed=True) == ["work does not mention amount"]  # type: ignore[arg-type]
