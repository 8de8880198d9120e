"""The pages for contributors name files that exist, and no errand needs more than ten.

That is counted twice: the files that the map names, and what the model of an errand imports,
directly or not, from the folder that it is in.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_layers import _imports, _modules, _name

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
_PATH = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|toml))`")
ERRANDS = re.findall(
    r"^\| (\w.*?) \| (.*) \|$", ARCHITECTURE.split("## Four errands")[1].split("\n## ")[0], re.M
)[1:]

MODELS = {
    "add a framework binding": "horovod.mxnet",
    "add a transport": "horovod.transport.mpi",
    "change bucketing and overlap": "horovod.torch.gradients.reducer",
    "find why an elastic job did not re-form": "horovod.runner.elastic.driver",
}
MOST = 10
TOO_MANY = {"change bucketing and overlap": 12}  # with buckets on devices and the next forward


def reading_list(module: str) -> set[str]:
    """Return a module, and all that it imports, directly or not, from the folder that it is in."""
    paths = {_name(path): path for path in _modules()}
    folder = paths[module].parent
    found: set[str] = set()
    unread = [module]
    while unread:
        name = unread.pop()
        found.add(name)
        for _, imported in _imports(paths[name], name, at_import=True):
            needed = imported if imported in paths else imported.rpartition(".")[0]
            if needed in paths and paths[needed].parent == folder and needed not in found:
                unread.append(needed)
    return found


def exists(path: str) -> bool:
    return (ROOT / path).is_file() or (ROOT / "horovod" / path).is_file()


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=["architecture", "contributing"])
def test_files_are_there(page: str):
    named = {path for path in _PATH.findall(page) if "yours" not in path}
    assert len(named) > 10
    assert sorted(path for path in named if not exists(path)) == []


@pytest.mark.parametrize(("errand", "files"), ERRANDS, ids=[errand for errand, _ in ERRANDS])
def test_an_errand_needs_at_most_ten_files(errand: str, files: str):
    assert 1 <= len(_PATH.findall(files)) <= 10


@pytest.mark.parametrize("errand", MODELS)
def test_the_model_of_an_errand_leads_to_at_most_ten_files(errand: str):
    assert len(reading_list(MODELS[errand])) <= TOO_MANY.get(errand, MOST)


def test_what_a_model_imports_is_followed():
    """With what comes over several steps, but not from other folders."""
    assert reading_list("horovod.runner.elastic.policy") == {
        f"horovod.runner.elastic.{name}" for name in ("policy", "termination", "job_state")
    }


def test_all_errands_are_seen():
    assert [errand for errand, _ in ERRANDS] == list(MODELS)
