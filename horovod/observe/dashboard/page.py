"""Make the page as one HTML file: page.html with the style sheet and the scripts inside.

The file loads nothing from elsewhere. `server` sends it; `dashboard` writes it with the data of an
ended job inside. A browser runs only the script and the style whose hashes the policy names, so
nothing that a worker wrote can run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from importlib import resources
from typing import Any

_SCRIPTS = ("charts.js", "data.js", "ranks.js", "page.js")  # one scope, in this order


@functools.cache
def _sources() -> tuple[str, str, str]:
    folder, reports = resources.files(__package__), resources.files("horovod.observe.reports")
    html, *scripts = (folder.joinpath(n).read_text("utf-8") for n in ("page.html", *_SCRIPTS))
    style = reports.joinpath("style.css").read_text("utf-8")  # the report on a timeline has it too
    return html, style, f'(() => {{\n"use strict";\n{"".join(scripts)}}})();'


def policy() -> str:
    """Return the Content-Security-Policy of the page."""
    _, css, js = _sources()
    return (
        f"default-src 'none'; script-src '{_hash(js)}'; style-src '{_hash(css)}'; "
        f"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def render(saved: Any = None) -> str:
    """Return the page; with ``saved`` data it shows these and asks no server."""
    html, css, js = _sources()
    html = html.replace("{{policy}}", policy()).replace("{{style}}", css).replace("{{script}}", js)
    return html.replace("{{saved}}", _embedded(saved))


def _embedded(data: Any) -> str:
    """Return JSON that can neither end the element that it is in nor begin a comment."""
    packed = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
