"""docs/site/wide_tables.py: rows of wide tables become cards on narrow screens."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "site"))

from wide_tables import on_page_content


def table(*titles: str) -> str:
    head = "".join(f"<th>{title}</th>" for title in titles)
    cells = "".join(f"<td>{number}</td>" for number in range(len(titles)))
    return f"<table>\n<thead>\n<tr>{head}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"


def test_cells_of_a_wide_table_know_their_column():
    made = on_page_content("<p>a</p>" + table("<code>Name</code>", "Type", "Default", "Meaning"))
    assert "<p>a</p><table data-cards>" in made
    assert '<td data-label="Name">0</td><td data-label="Type">1</td>' in made
    assert '<td data-label="Meaning">3</td>' in made


def test_narrow_tables_stay_as_they_are():
    narrow = table("Name", "Type", "Meaning")
    assert on_page_content(narrow) == narrow
    assert on_page_content(narrow + table(*"abcd")).startswith(narrow)
