"""The page's files: its colours are those of the timeline's report."""

from __future__ import annotations

import re

from horovod.observe.dashboard import page
from horovod.observe.reports.styles import CSS

SAME = {
    "page": "paper",
    "panel": "card",
    "text": "ink",
    "faint": "quiet",
    "line": "line",
    "compute": "compute",
    "wait": "wait",
    "reduce": "reduction",
    "bad": "late",
}


def colours(css: str) -> list[dict[str, str]]:
    """The variables of both schemes, light first."""
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]
    return [dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in (light, dark)]


def test_what_a_step_is_made_of_has_the_colours_of_the_report():
    for ours, theirs in zip(colours(page._sources()[1]), colours(CSS), strict=True):
        assert {name: ours[name] for name in SAME} == {
            name: theirs[other] for name, other in SAME.items()
        }
