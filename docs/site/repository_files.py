"""A hook of MkDocs: files outside docs/ that pages link to become pages of the site.

Pages are read in the repository too, where `../examples/pytorch/pytorch_mnist.py` is right. On the
site the folder docs/ is the root, so the file is shown at the same path below it: Markdown as a
page, other files as they are, folders as a list. A link to what does not exist stays as it is, and
MkDocs reports it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = PurePosixPath("docs")
ALWAYS = ["SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"]
ALWAYS += ["examples/README.md", "benchmarks/README.md"]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"  # from the search
FENCED = re.compile(r"^(```|````).*?^\1$", re.DOTALL | re.MULTILINE)

_sources: dict[str, PurePosixPath] = {}  # a page of the site, and where it is in the repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [PurePosixPath(name) for name in ALWAYS if (ROOT / name).is_file()]
    for file in files.documentation_pages():
        _sources[file.src_uri] = DOCS / file.src_uri
        waiting += _outside(_sources[file.src_uri])
    while waiting:
        path = waiting.pop()
        uri = _uri(path)
        if uri not in _sources:
            _sources[uri] = path
            files.append(File.generated(config, uri, content=_content(path)))
            waiting += _outside(path) if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = _sources[page.file.src_uri]
    here = PurePosixPath(page.file.src_uri).parent

    def follow(link: re.Match[str]) -> str:
        target = _resolve(source, link[2])
        if target is None:
            return link[0]
        return f"{link[1]}{os.path.relpath(_uri(target), here)}{link[3]}"

    return _in_prose(markdown, lambda text: LINK.sub(follow, text))


def _outside(source: PurePosixPath) -> list[PurePosixPath]:
    """The files outside docs/ that a page links to."""
    found = []
    for link in LINK.finditer(FENCED.sub("", (ROOT / source).read_text())):
        target = _resolve(source, link[2])
        if target is not None and target.parts[0] != str(DOCS):
            found.append(target)
    return found


def _resolve(source: PurePosixPath, link: str) -> PurePosixPath | None:
    """The file or folder of the repository that a link of this page means."""
    path = (ROOT / source.parent / link).resolve()
    if not path.exists() or not path.is_relative_to(ROOT) or path == ROOT:
        return None
    if (path / "README.md").is_file():
        path /= "README.md"
    return PurePosixPath(path.relative_to(ROOT))


def _uri(path: PurePosixPath) -> str:
    """Where the site has a file of the repository."""
    if path.parts[0] == str(DOCS):
        return str(path.relative_to(DOCS))
    if path == PurePosixPath("README.md"):
        return "index.md"  # the site has a start page of its own
    return str(path) if path.suffix == ".md" else f"{path}.md"


def _content(path: PurePosixPath) -> str:
    if (ROOT / path).is_dir():
        names = sorted(found.name for found in (ROOT / path).iterdir() if found.name[0] not in "._")
        return f"{HIDDEN}# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = (ROOT / path).read_text()
    if path.suffix == ".md":
        return text
    language = {".py": "python", ".yml": "yaml", ".sh": "bash"}.get(path.suffix, "text")
    return f"{HIDDEN}# {path.name}\n\n`{path}`\n\n````{language}\n{text}````\n"


def _in_prose(markdown: str, change: Callable[[str], str]) -> str:
    """Apply `change` to what is not a fenced block."""
    parts, end = [], 0
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
