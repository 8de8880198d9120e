"""Imports point down only: clusters > bindings > jobs > engine > timeline > transport > common."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "horovod"

# Each layer may import itself and what comes after it.
LAYERS = [
    {"spark", "ray"},
    {"torch", "tensorflow", "keras", "_keras", "jax", "mxnet", "lightning"},
    {"runner", "elastic", "data"},
    {"engine"},
    {"timeline"},  # reads files only; the engine, which writes them, shares their format
    {"transport"},
    {"common"},
]


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything the file imports, at any depth of the code."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _layer(module: str) -> int | None:
    """The index of a module's layer; None for `horovod` itself and for other packages."""
    parts = module.split(".")
    if parts[0] != "horovod" or len(parts) == 1:
        return None
    for index, names in enumerate(LAYERS):
        if parts[1] in names:
            return index
    return None


def _violations(path: Path, module: str) -> list[str]:
    mine = _layer(module)
    if mine is None:  # `horovod` itself stands above all layers
        return []
    found = []
    for line, imported in _imports(path, module):
        theirs = _layer(imported)
        if theirs is not None and theirs < mine:
            found.append(f"{path.name}:{line}: {module} imports {imported}")
    return found


def test_every_part_of_the_package_has_a_layer():
    known = set().union(*LAYERS)
    parts = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert parts <= known, f"say in LAYERS where {sorted(parts - known)} belong"


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_imports_point_down(path: Path):
    assert not _violations(path, _name(path))


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("import horovod.engine.runtime", False),
        ("from horovod import torch", False),
        ("from ..engine import runtime", False),
        ("from .. import engine", False),
        ("def f():\n    from horovod.runner import launch", False),
        ("from . import base", True),
        ("from ..common.config import Config", True),
        ("import torch", True),
    ],
)
def test_the_check_itself_sees_every_way_to_import(tmp_path: Path, source: str, allowed: bool):
    path = tmp_path / "shm.py"
    path.write_text(source)
    assert (not _violations(path, "horovod.transport.shm")) == allowed


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_every_module_says_what_it_is_for(path: Path):
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), f"{path} has no docstring"


@pytest.mark.parametrize("layer", ["common", "runner", "timeline"])
def test_what_the_launcher_needs_does_not_import_torch(layer: str):
    modules = [
        _name(p) for p in _modules() if p.is_relative_to(PACKAGE / layer) and p.stem != "__main__"
    ]
    program = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, module\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


# Names of Horovod's public API: the same in every binding, and one that means two things.
BINDINGS = LAYERS[1]
UPSTREAMS = {"Store"}  # horovod.spark.common.store; the job's own is horovod.common.store


def test_a_class_name_means_one_thing():
    """In a layer a file may say more precisely what it means; two layers never share a name."""
    where: dict[str, set[str]] = {}
    for path in _modules():
        layer = path.relative_to(PACKAGE).parts[0]
        if layer in BINDINGS or layer.endswith(".py"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, set()).add(layer)
    shared = {name: sorted(layers) for name, layers in where.items() if len(layers) > 1}
    for name in UPSTREAMS:
        del shared[name]
    assert not shared, f"two layers define these: {shared}"
