"""What holds for every page of the documentation: commands parse, and links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import textwrap
from pathlib import Path

from horovod.runner.options.arguments import parse_args
from tests.ranks import run_ranks

HOME = Path(__file__).resolve().parents[2] / "docs" / "index.md"

# For programs that give each rank a GPU of its own, on a machine that has one, but not so many.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def check_commands(page: Path, count: int) -> None:
    """There are `count` commands with horovodrun, for two processes, and it understands them."""
    commands = re.findall(r"^    (horovodrun .*)$", page.read_text(), re.MULTILINE)
    assert len(commands) == count
    for command in commands:
        assert parse_args(shlex.split(command)[1:]).num_proc == 2


def check_links(page: Path) -> None:
    """Every link of the page leads to a file that exists, and to a title in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        is_shown = file.suffix != ".md" or not anchor or anchor in anchors(file)
        assert is_shown, f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """What a link may name after #, as MkDocs and code hosts make it of titles."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def prose(page: Path) -> str:
    """The page without its fenced blocks, also those inside of tabs."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[tuple[str, int]]:
    """The fenced blocks of a language, and the line where each begins."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(block[1], text[: block.start(1)].count("\n")) for block in found]


def tabs(page: Path) -> dict[str, str]:
    """The Python samples that a page shows beside each other, by the title of their tab."""
    found = re.finditer(
        r'^=== "([^"\n]+)"\n\n    ```python\n(.*?)^    ```$',
        page.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    return {tab[1]: textwrap.dedent(tab[2]) for tab in found}


def check_home_sample(framework: str, env: dict[str, str] | None = None) -> None:
    """The home page's sample for a framework trains on two ranks, and prints what the page says."""
    ((promised, _),) = blocks(HOME, "text")
    first, second = run_ranks(_run_home_sample, 2, framework, env=env, timeout=280)
    assert promised == f"[0]<stdout>:{first}"
    assert second == ""


def _run_home_sample(rank: int, size: int, framework: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tabs(HOME)[framework], str(HOME), "exec"), {"__name__": "page"})
    return printed.getvalue()
