"""Imports point down only, and never in a circle.

Clusters > bindings > jobs > engine > observers > transport > common; docs/architecture.md draws it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "horovod"

# Each part may import itself and what comes in later layers, but not its neighbours. Where a part
# of a folder has another layer than the folder it is named: upstream keeps its fronts of Keras for
# TensorFlow inside of `tensorflow`, and the live page stands on the launcher's output and hosts.
CLUSTERS = [{"spark", "ray"}]
BINDINGS = [
    {"tensorflow.optimizer"},
    {"keras", "tensorflow.keras"},
    {"tensorflow.elastic"},
    {"_keras"},
    {"tensorflow", "jax", "mxnet", "lightning"},
    {"torch"},
]
JOBS = [{"runner", "elastic", "data"}, {"observe.dashboard"}, {"runner.output"}, {"runner.slots"}]
OBSERVERS = [{"observe"}, {"observe.statistics"}, {"observe.reports"}, {"observe.timeline"}]
REST = [*JOBS, {"engine"}, *OBSERVERS, {"transport"}, {"common"}]
LAYERS = [*CLUSTERS, *BINDINGS, *REST]

ALLOWED = {
    # Importing horovod.torch makes its name known to Lightning, as users expect; `registration`
    # then waits for Lightning and imports nothing before.
    ("horovod.torch", "horovod.lightning.registration"),
    # An old name (docs/old_names.md), imported when somebody asks for it.
    ("horovod.runner.elastic.driver", "horovod.runner._upstream.find_old_name"),
}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _statements(node: ast.AST, *, at_import: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """All import statements, or only those that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if at_import and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if at_import and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from _statements(child, at_import=at_import)


def _imports(path: Path, module: str, *, at_import: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything the file imports."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = _tree(path.read_text(encoding="utf-8"))
    for node in _statements(tree, at_import=at_import):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
            continue
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            parents = parents[: len(parents) - (node.level - 1)]
            base = ".".join([*parents, base] if base else parents)
        for alias in node.names:
            yield node.lineno, f"{base}.{alias.name}"


def _part(module: str) -> tuple[int, str] | None:
    """A module's layer and part; None for `horovod` itself and for other packages."""
    parts = module.split(".")
    if parts[0] != "horovod":
        return None
    for name in (".".join(parts[1:3]), ".".join(parts[1:2])):
        for index, names in enumerate(LAYERS):
            if name in names:
                return index, name
    return None


def _violations(path: Path, module: str) -> list[str]:
    mine = _part(module)
    if mine is None:  # `horovod` itself stands above all layers
        return []
    found = []
    for line, imported in _imports(path, module):
        theirs = _part(imported)
        if theirs is None or theirs == mine or theirs[0] > mine[0]:
            continue
        if path.name == "__init__.py" and imported.startswith(f"{module}."):
            continue  # a package offers what is inside of it
        if (module, imported) not in ALLOWED:
            found.append(f"{path.name}:{line}: {module} imports {imported}")
    return found


# The folders of `runner`. Above are the command, what is beside it, and the names of upstream.
RUNNER = [
    {"functions"},
    {"jobs"},
    {"elastic"},
    {"options"},
    {"agents"},
    {"output"},
    {"slots"},
]


def _folder(module: str) -> tuple[int, str] | None:
    """A module's layer and folder in the runner; None elsewhere."""
    parts = module.split(".")
    if parts[:2] != ["horovod", "runner"]:
        return None
    folder = "".join(parts[2:3])
    for index, names in enumerate(RUNNER):
        if folder in names:
            return index, folder
    return -1, ""


def _runner_violations(path: Path, module: str) -> list[str]:
    mine = _folder(module)
    found = []
    for line, imported in _imports(path, module):
        theirs = _folder(imported)
        if (module, imported) in ALLOWED:
            continue
        if mine and theirs and theirs != mine and theirs[0] <= mine[0]:
            found.append(f"{path.name}:{line}: {module} imports {imported}")
    return found


def test_every_folder_of_the_runner_has_a_layer():
    folders = {path.parent.name for path in (PACKAGE / "runner").glob("*/__init__.py")}
    assert folders == {"_upstream"}.union(*RUNNER)


def test_imports_in_the_runner_point_down():
    for path in sorted((PACKAGE / "runner").rglob("*.py")):
        assert not _runner_violations(path, _name(path))
        assert not [name for _, name in _imports(path, _name(path)) if "horovod.engine" in name]


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("horovod.runner.output.report", "from horovod.runner.jobs import request", False),
        ("horovod.runner.jobs.run_job", "from horovod.runner import launch", False),
        ("horovod.runner.agents.starters", "from horovod.runner.options import values", False),
        ("horovod.runner.agents.starters", "from horovod.runner.agents.agent import main", True),
        ("horovod.runner.elastic.driver", "import horovod.runner.slots.hosts", True),
        ("horovod.runner.launch", "from horovod.runner.jobs import run_job", True),
    ],
)
def test_the_order_of_the_runner(tmp_path: Path, module: str, source: str, allowed: bool):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert (not _runner_violations(path, module)) == allowed


def _reaches_into_runner(path: Path, module: str) -> list[str]:
    """Where a cluster's launcher imports something of the runner that is not in its door."""
    return [
        f"{path.name}:{line}: {imported}"
        for line, imported in _imports(path, module)
        if imported.startswith("horovod.runner") and not imported.startswith("horovod.runner.api.")
    ]


def test_clusters_use_the_door_of_the_runner():
    for part in set().union(*CLUSTERS):
        for path in sorted((PACKAGE / part).rglob("*.py")):
            assert not _reaches_into_runner(path, _name(path))


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("from horovod.runner.api import JobController", True),
        ("from horovod.runner.agents.controller import JobController", False),
        ("def f():\n    import horovod.runner.launch", False),
    ],
)
def test_reaching_past_the_door_is_seen(tmp_path: Path, source: str, allowed: bool):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert (not _reaches_into_runner(path, "horovod.ray.static")) == allowed


# The rooms of `torch`. The modules beside them are upstream's names, above and below the rooms.
TORCH = ["elastic", "optimizers", "gradients", "hooks", "ops"]


def _room_violations(path: Path, module: str) -> list[str]:
    rooms = {f"horovod.torch.{room}": index for index, room in enumerate(TORCH)}
    mine = rooms.get(".".join(module.split(".")[:3]))
    found = []
    for line, imported in _imports(path, module):
        theirs = rooms.get(".".join(imported.split(".")[:3]))
        if mine is not None and theirs is not None and theirs < mine:
            found.append(f"{path.name}:{line}: {module} imports {imported}")
    return found


def test_imports_between_the_rooms_of_torch_point_down():
    for path in sorted((PACKAGE / "torch").rglob("*.py")):
        assert not _room_violations(path, _name(path))


def test_the_order_of_the_rooms_of_torch(tmp_path: Path):
    assert {path.parent.name for path in (PACKAGE / "torch").glob("*/__init__.py")} == set(TORCH)
    path = tmp_path / "buckets.py"
    path.write_text(
        "from horovod.torch.optimizers import reducing\nfrom horovod.torch import hooks"
    )
    assert len(_room_violations(path, "horovod.torch.gradients.buckets")) == 1


def test_every_part_of_the_package_has_a_layer():
    known = {name.partition(".")[0] for name in set().union(*LAYERS)}
    parts = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert parts <= known, f"say in LAYERS where {sorted(parts - known)} belong"
    rooms = {f"observe.{path.parent.name}" for path in (PACKAGE / "observe").glob("*/__init__.py")}
    assert rooms == {name for name in set().union(*LAYERS) if name.startswith("observe.")}


def test_imports_point_down():
    assert not [found for path in _modules() for found in _violations(path, _name(path))]


def _circle(modules: dict[str, Path], *, at_import: bool = True) -> list[str]:
    """Modules of which each imports the next; empty if there is no such circle.

    Those cannot be imported at all, except that some of it may be late or for type checkers:
    `at_import` false sees these too.
    """
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        needed = graph.setdefault(module, set())
        for _, imported in _imports(path, module, at_import=at_import):
            if (module, imported) in ALLOWED:
                continue
            name = imported if imported in modules else imported.rpartition(".")[0]
            if name in modules and name != module:
                needed.add(name)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_modules_do_not_import_each_other_in_a_circle():
    assert not _circle({_name(path): path for path in _modules()})


def test_there_is_no_circle_through_late_imports_either():
    """Not through imports in a function, and not through those for a type."""
    assert not _circle({_name(path): path for path in _modules()}, at_import=False)


def test_a_circle_is_seen(tmp_path: Path):
    modules = {f"horovod.engine.{name}": tmp_path / f"{name}.py" for name in "abc"}
    sources = ["from horovod.engine import b", "import horovod.engine.c", "from .a import thing"]
    for path, source in zip(modules.values(), sources, strict=True):
        path.write_text(source)
    assert set(_circle(modules)) == set(modules)
    for late in (
        "def f():\n    from .a import thing",
        "if TYPE_CHECKING:\n    import horovod.engine.a",
    ):
        modules["horovod.engine.c"].write_text(late)
        assert not _circle(modules)
        assert set(_circle(modules, at_import=False)) == set(modules)


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("horovod.torch.optimizer", "import horovod.tensorflow", False),
        ("horovod.tensorflow.functions", "from horovod._keras import variables", False),
        ("horovod.tensorflow.functions", "from horovod.tensorflow import keras", False),
        ("horovod._keras.elastic", "from horovod.tensorflow.elastic import x", False),
        ("horovod._keras.elastic", "from horovod.tensorflow.functions import x", True),
        ("horovod.tensorflow.keras.elastic", "from horovod._keras import elastic", True),
        ("horovod.jax.arrays", "import horovod.tensorflow", False),
        ("horovod.lightning.base", "import horovod.torch as hvd", True),
        ("horovod.torch.hooks.base", "from horovod.lightning import registration", False),
    ],
)
def test_the_order_of_the_bindings(tmp_path: Path, module: str, source: str, allowed: bool):
    path = tmp_path / f"{module.rpartition('.')[2]}.py"
    path.write_text(source)
    assert (not _violations(path, module)) == allowed


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
        ("from horovod.observe.timeline import files", False),
        ("import torch", True),
    ],
)
def test_the_check_itself_sees_every_way_to_import(tmp_path: Path, source: str, allowed: bool):
    path = tmp_path / "shm.py"
    path.write_text(source)
    assert (not _violations(path, "horovod.transport.shm")) == allowed


def test_every_module_says_what_it_is_for():
    for path in _modules():
        source = path.read_text(encoding="utf-8")
        assert ast.get_docstring(_tree(source)), f"{path} has no docstring"


@pytest.mark.parametrize(
    "layer", ["common", "runner", "observe/timeline", "observe/reports", "observe/dashboard"]
)
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
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


# What is behind the runtime, which is the bindings' only door to the engine's operations.
BEHIND_THE_RUNTIME = {
    f"horovod.engine.{name}" for name in ("channel", "agreement", "execution.executor")
}


def _is_behind(module: str) -> bool:
    return any(f"{module}.".startswith(f"{each}.") for each in BEHIND_THE_RUNTIME)


def _reaches_behind(tree: ast.AST) -> list[str]:
    """Where a binding takes hold of a channel, or of what is in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_behind(node.module or ""):
            found.append(f"line {node.lineno}: {node.module}")
        if isinstance(node, ast.Attribute) and node.attr == "channel":
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_bindings_ask_the_runtime():
    for path in _modules():
        part = _part(_name(path))
        if part is not None and part[0] < LAYERS.index({"engine"}) and part[1] != "spark":
            found = _reaches_behind(_tree(path.read_text(encoding="utf-8")))
            assert not found, f"{path}: {found}"


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("from horovod.engine.channel import Channel", False),
        ("from horovod.engine.agreement.rounds import Rounds", False),
        ("size = runtime.channel(0).group.size", False),
        ("prepared.channel.submit(request)", False),
        ("size = runtime.group(0).size", True),
        ("from horovod.engine.request import Request", True),
    ],
)
def test_reaching_behind_the_runtime_is_seen(source: str, allowed: bool):
    assert (not _reaches_behind(ast.parse(source))) == allowed


MOST_FILES = 20
MOST_LINES = 400


def test_folders_and_modules_stay_small():
    """What outgrows this is divided: a folder into rooms, a module into modules."""
    files: dict[Path, int] = {}
    for path in _modules():
        files[path.parent] = files.get(path.parent, 0) + 1
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= MOST_LINES, f"{path.relative_to(PACKAGE)} has {lines} lines"
    large = {str(folder): count for folder, count in files.items() if count > MOST_FILES}
    assert not large


UPSTREAMS = {"Store"}  # horovod.spark.common.store; the job's own is horovod.common.store


def test_a_class_name_means_one_thing():
    """In a layer a file may say more precisely what it means; two layers never share a name.

    Names of Horovod's public API are the same in every binding.
    """
    bindings = set().union(*BINDINGS)
    where: dict[str, set[str]] = {}
    for path in _modules():
        layer = path.relative_to(PACKAGE).parts[0]
        if layer in bindings or layer.endswith(".py"):
            continue
        for node in _tree(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, set()).add(layer)
    shared = {name: sorted(layers) for name, layers in where.items() if len(layers) > 1}
    for name in UPSTREAMS:
        del shared[name]
    assert not shared, f"two layers define these: {shared}"
