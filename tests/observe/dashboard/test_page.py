"""The page's files: one style sheet, of which every colour has a light and a dark form."""

from __future__ import annotations

import re
from pathlib import Path

from horovod.observe.dashboard import page

REPORTS = Path(page.__file__).parents[1] / "reports"
STYLE = (REPORTS / "style.css").read_text()
SOURCES = [Path(page.__file__).with_name(name) for name in ("page.html", *page._SCRIPTS)]


def test_every_colour_is_there_in_light_and_dark():
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    named = [set(re.findall(r"--([\w-]+): #", block)) for block in (light, dark)]
    assert named[0] == named[1]
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE))
    assert used <= named[0] | {"mono", "part"}
    assert named[0] <= used, "a colour that nothing has"


def test_colours_are_named_in_the_style_sheet_alone():
    rest = STYLE[STYLE.index("* { box-sizing") :]
    for text in [rest, *(p.read_text() for p in [*SOURCES, *REPORTS.glob("*.py")])]:
        assert re.findall(r"#[0-9a-f]{6}\b", text) == []
