"""The tables in docs/horovodrun.md are made from the parser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from horovod.runner.options.config_file import schema
from horovod.runner.options.parser import make_parser
from horovod.runner.options.tunables import TUNABLES

sys.path.append(str(Path(__file__).parents[2] / "docs" / "site"))

from option_tables import PAGE, fill_in, generated_parts


def test_page_is_current():
    command = "python docs/site/option_tables.py"
    assert PAGE.read_text() == fill_in(PAGE.read_text()), f"run: {command}"
    assert all(text in PAGE.read_text() for text in generated_parts().values())


def test_page_names_every_option_variable_and_key():
    page = PAGE.read_text()
    for action in make_parser()._actions:
        if action.help != argparse.SUPPRESS:
            assert all(f"`{flag}`" in page for flag in action.option_strings)
    assert all(f"`{row.env}`" in page for row in TUNABLES)
    assert all(f"`{key}`" in page for key, row in schema().items() if row)
