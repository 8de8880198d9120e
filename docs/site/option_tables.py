"""Writes the parts of docs/horovodrun.md that repeat what the parser and the tunables say.

    python docs/site/option_tables.py

brings the tables of options and the example of a configuration file up to date; a test fails while
they are stale. All else on the page is written there by hand.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterator
from pathlib import Path

from horovod.runner.options.config_file import CONTROLLER, CONTROLLERS, schema
from horovod.runner.options.parser import make_parser
from horovod.runner.options.tunables import TUNABLES, Tunable

PAGE = Path(__file__).resolve().parents[1] / "horovodrun.md"

_ROWS = {row.dest: row for row in TUNABLES}


def fill_in(page: str) -> str:
    """Return the page with new text between the comments ``begin NAME`` and ``end NAME``."""
    for name, text in generated_parts().items():
        before, begin, rest = page.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->\n")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def generated_parts() -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    example = "".join(f"    {line}\n" for line in _example())
    return {"options": _sections(), "configuration": example}


def _sections() -> str:
    """Return a section for each group of options."""
    sections = []
    for group in make_parser()._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        if actions:
            title = str(group.title)
            sections.append(f"## {title[0].upper()}{title[1:]}\n\n" + _table(actions))
    return "\n".join(sections)


def _table(actions: list[argparse.Action]) -> str:
    lines = ["| Option | Meaning | Variable | In the file |", "|---|---|---|---|"]
    for action in actions:
        row = _ROWS.get(action.dest)
        flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
        if action.metavar:
            names = [action.metavar] if isinstance(action.metavar, str) else action.metavar
            flags += f" `{' '.join(names)}`"
        cells = [
            flags,
            html.escape(str(action.help).replace("%%", "%"), quote=False),
            f"`{row.env}`" if row else "",
            " or ".join(f"`{key}`" for key in (row.key, row.inverse_key) if key) if row else "",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _example() -> Iterator[str]:
    """Yield the lines of a configuration file with every key."""
    section = ""
    for key, row in schema().items():
        if row is None:
            yield f"{CONTROLLER}:  # {' or '.join(CONTROLLERS)}"
            continue
        if row.inverse_key and row.key and key == row.key:
            continue  # the key with the opposite sense follows
        before, _, name = key.partition(".")
        if before != section:
            section = before
            yield f"{section}:"
        value = _default(row, inverse=key == row.inverse_key)
        yield f"  {name}: {value}".rstrip() + f"  # {row.flag}"


def _default(row: Tunable, *, inverse: bool) -> str:
    default = row.knob.default
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default is not inverse).lower()
    if row.choices:
        return str(default).upper()
    # The variable's value for one unit of the option shows how many units the default is.
    unit = float(row.transform(1)) if row.knob.type in (int, float) else 1.0
    return f"{default / unit:g}"


if __name__ == "__main__":
    PAGE.write_text(fill_in(PAGE.read_text("utf-8")), "utf-8")
