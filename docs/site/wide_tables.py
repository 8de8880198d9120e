"""A hook for MkDocs: wide tables can be read on a phone.

Tables with four columns or more get an attribute by which style.css shows each row as a card on
narrow screens; every cell of such a row carries the title of its column.
"""

from __future__ import annotations

import re
from typing import Any

WIDE = 4  # columns
TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
TITLE = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
CELL = re.compile(r"<td")


def on_page_content(html: str, **_: Any) -> str:
    return TABLE.sub(_with_labels, html)


def _with_labels(table: re.Match[str]) -> str:
    titles = [re.sub(r"<[^>]+>|\"", "", title).strip() for title in TITLE.findall(table[1])]
    if len(titles) < WIDE:
        return table[0]

    def label_cells(row: re.Match[str]) -> str:
        labels = iter(titles)
        return CELL.sub(lambda cell: f'{cell[0]} data-label="{next(labels, "")}"', row[0])

    return f"<table data-cards>{ROW.sub(label_cells, table[1])}</table>"
