"""Draws the badges of the README: what the package needs and is, from pyproject.toml.

    python docs/site/badges.py

writes docs/assets/badges; a test fails while they are stale. No service on the network is asked.
"""

from __future__ import annotations

import re

from charts import ROOT

TARGET = ROOT / "docs" / "assets" / "badges"
COLOUR = "#1f8a8a"


def badge(label: str, value: str) -> str:
    left, right = 14 + 6.6 * len(label), 14 + 6.6 * len(value)
    width = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="20" role="img">\n'
        f"<title>{label}: {value}</title>\n"
        f'<rect width="{width:.0f}" height="20" rx="4" fill="#4a5361"/>\n'
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" rx="4" fill="{COLOUR}"/>\n'
        f'<rect x="{left:.0f}" width="6" height="20" fill="{COLOUR}"/>\n'
        '<g fill="#ffffff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" '
        'text-anchor="middle">\n'
        f'<text x="{left / 2:.1f}" y="14">{label}</text>\n'
        f'<text x="{left + right / 2:.1f}" y="14">{value}</text>\n</g>\n</svg>\n'
    )


def files() -> dict[str, str]:
    """What TARGET must hold: file names and contents."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    package = (ROOT / "horovod" / "__init__.py").read_text(encoding="utf-8")
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (licence,) = re.findall(r'^license = "(.+)"$', project, re.MULTILINE)
    (version,) = re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    (torch,) = re.findall(r'^pytorch = \["torch>=(.+)"\]$', project, re.MULTILINE)
    return {
        "version.svg": badge("version", version),
        "python.svg": badge("Python", f"{pythons[0]} to {pythons[-1]}"),
        "pytorch.svg": badge("PyTorch", f"{torch} or newer"),
        "licence.svg": badge("licence", licence),
    }


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (TARGET / name).write_text(content, encoding="utf-8")
