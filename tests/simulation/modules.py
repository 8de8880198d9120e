"""The modules of Horovod inside of the simulation: loaded once, with simulated system modules.

A module that uses time, threads, connections or processes is executed anew, in a library of its
own, and finds simulated modules in place of Python's. All simulated processes share the library,
since loading a hundred modules for each would take longer than the job. What a module keeps for its
process (variables that functions rebind, locks, registries, the engine's `runtime`) is exchanged
whenever another process runs: see `Variable`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod.common import logging as real_logging
from tests.simulation.system import open_file

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World

Patches = Mapping[str, tuple[tuple[str, str], ...]]

REPLACED = (
    *("atexit", "importlib", "os", "psutil", "secrets", "select", "selectors", "signal"),
    *("simulated", "socket", "threading", "time"),
)
_INNER = (
    *("_ctypes", "_queue", "_signal", "_socket", "_thread", "fcntl", "resource", "subprocess"),
)
"""Modules that are replaced too, in modules that use one of the others."""

_OURS = ("horovod", "tests")
ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("horovod.torch", "horovod.torch.elastic", "horovod.torch.optimizers")  # left empty
_PARTS = {
    f"horovod.torch.{name}" for name in ("functions", "optimizers.local", "optimizers.pending")
}
_Cached = type(functools.cache(len))
_CONTAINERS = ("dict", "list", "set", "Counter", "OrderedDict", "defaultdict", "deque")


class Variable:
    """A variable of a module that every process has for itself."""

    def __init__(self, module: ModuleType, name: str, value: Any) -> None:
        self.values = vars(module)
        self.name = name
        self._value = value  # the code that makes a new one
        # An object that other modules import by its name stays, and gets other attributes.
        self.object: Any = None
        if not name.startswith("_") and hasattr(vars(module)[name], "__dict__"):
            self.object = vars(module)[name]

    def get(self) -> Any:
        return vars(self.object) if self.object is not None else self.values[self.name]

    def renew(self) -> Any:
        """Return the variable as a new process has it."""
        value = eval(self._value, self.values)
        return vars(value) if self.object is not None else value


def assign_all(variables: Sequence[Variable]) -> Callable[[list[Any]], None]:
    """Return a function that sets all variables which are no objects: one statement is fastest."""
    scope: dict[str, Any] = {f"values{i}": each.values for i, each in enumerate(variables)}
    targets = [
        "_" if each.object is not None else f"values{i}[{each.name!r}]"
        for i, each in enumerate(variables)
    ]
    exec(f"def assign(known):\n    [{', '.join(targets)}] = known", scope)
    assign: Callable[[list[Any]], None] = scope["assign"]
    return assign


def keep_all(rebound: Sequence[tuple[int, dict[str, Any], str]]) -> Callable[[list[Any]], None]:
    """Return a function that keeps the values of variables, each at an index, in a list."""
    scope: dict[str, Any] = {f"values{i}": values for i, values, _ in rebound}
    lines = [f"    known[{i}] = values{i}[{name!r}]\n" for i, _, name in rebound]
    exec(f"def keep(known):\n{''.join(lines)}    return", scope)
    keep: Callable[[list[Any]], None] = scope["keep"]
    return keep


class Library:
    """Modules with some texts of their sources replaced; `world` is that of the present job."""

    world: World
    system: Mapping[str, Any]  # the system modules of the process that runs now

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._modules: dict[str, Any] = {}
        self._variables: list[Variable] = []
        self._rebound: list[tuple[int, dict[str, Any], str]] = []
        self._objects: list[tuple[int, Any]] = []
        self._assign: Callable[[list[Any]], None] = lambda known: None  # to all that are no objects
        self._keep: Callable[[list[Any]], None] = lambda known: None  # those that functions rebind
        self._caches: list[Any] = []
        self._replaced = {
            name: type(name, (_Replaced,), {})(self, name) for name in (*REPLACED, *_INNER)
        }
        self._builtins = {
            **vars(builtins),
            "__import__": self._import,
            "open": functools.partial(open_file, self),
        }
        self._found: dict[str, Any] = {}  # what `_find` has returned
        self.owner: Any = None  # the process whose variables are in the modules now

    @property
    def count(self) -> int:
        """The number of modules that are loaded."""
        return len(self._modules)

    def begin(self, world: World) -> None:
        """Forget the processes of earlier jobs."""
        self.world, self.owner = world, None
        for function in self._caches:
            function.cache_clear()

    @property
    def process(self) -> Process:
        """The process that runs now."""
        task = self.world.current
        assert task is not None, "only simulated threads may use the system"
        return task.process

    def enter(self, process: Process) -> None:
        """Put the variables of a process, which runs now, into the modules."""
        owner = self.owner
        if owner is process:
            return
        count = len(self._variables)
        if owner is not None:
            known = owner.variables
            if len(known) < count:  # it has loaded modules
                known += [variable.get() for variable in self._variables[len(known) :]]
            self._keep(known)
        self.owner, self.system = process, process.system
        known = process.variables
        if len(known) < count:
            known += [variable.renew() for variable in self._variables[len(known) :]]
        self._assign(known)
        for index, each in self._objects:
            object.__setattr__(each, "__dict__", known[index])

    def load(self, name: str) -> Any:
        """Return the module of that name."""
        if name in self._modules:
            return self._modules[name]
        parent, _, child = name.rpartition(".")
        above = self.load(parent) if parent else None
        if name == "horovod.common.logging":
            module: Any = _Logging(self)
        elif name in _PARTS:
            module = self.load("tests.simulation.torch_parts")
        elif name in _PACKAGES:
            module = ModuleType(name)
        elif self._is_real(name):
            module = importlib.import_module(name)
        else:
            module = self._execute(name)
        self._modules[name] = module
        if above is not None and not hasattr(above, child):
            setattr(above, child, module)
        return module

    def _execute(self, name: str) -> ModuleType:
        if name.startswith("horovod") and not name.startswith(_PACKAGES):
            importlib.import_module(name)  # dataclasses look their module up by its name
        source = compiled(name, self._patches.get(name, ()))
        path = source.path
        module = self._modules[name] = ModuleType(name)
        module.__file__ = str(path)
        if path.name == "__init__.py":
            module.__path__ = [str(path.parent)]
        module.__package__ = name if path.name == "__init__.py" else name.rpartition(".")[0]
        vars(module)["__builtins__"] = self._builtins
        exec(source.code, vars(module))
        for name_, code in source.state.items():
            variable, index = Variable(module, name_, code), len(self._variables)
            self._variables.append(variable)
            if variable.object is not None:
                self._objects.append((index, variable.object))
            else:
                self._rebound += [(index, variable.values, name_)] * (name_ in source.rebound)
        self._assign, self._keep = assign_all(self._variables), keep_all(self._rebound)
        self._caches += [each for each in vars(module).values() if isinstance(each, _Cached)]
        return module

    def _is_real(self, name: str) -> bool:
        """Return whether a module needs nothing simulated. Packages lead to ones that do."""
        path = _path_of(name)
        is_package = path is not None and path.name == "__init__.py"
        if name == "horovod.runner.agents.bootstrap":
            return False  # it reads sources
        return not is_package and not _uses_the_system(name) and name not in self._patches

    def run(self, program: str) -> None:
        """Run the text of a program: Python's option -c."""
        module = self.system["sys"].modules["__main__"] = ModuleType("__main__")
        vars(module)["__builtins__"] = self._builtins
        exec(program, vars(module))

    def _find(self, name: str) -> Any:
        """Return what `importlib.util.find_spec` does, with changes to the source."""
        if name not in self._found:
            found = compiled(name, self._patches.get(name, ()))
            text = found.path.read_text(encoding="utf-8")
            loader = SimpleNamespace(get_code=lambda _: found.code, get_source=lambda _: text)
            self._found[name] = SimpleNamespace(loader=loader)
        return self._found[name]

    def _import(
        self, name: str, globals_: Any = None, locals_: Any = None, names: Any = (), level: int = 0
    ) -> Any:
        """Do what an import statement of the code under test asks for."""
        if level:
            name = importlib.util.resolve_name("." * level + name, globals_["__package__"])
        top = name.partition(".")[0]
        own = self.system["sys"].modules  # of an agent, which got them through its pipe
        if own and name in ("sys", *own):
            return self.system["sys"] if name == "sys" else own[name]
        if name == "importlib.util" and names:
            return SimpleNamespace(find_spec=self._find)
        if name in self._replaced:
            if names and name not in _INNER:
                raise ImportError(f"{name} is simulated: import it whole, not {names} from it")
            return self._replaced[name]
        if top not in _OURS:
            return builtins.__import__(name, globals_, locals_, names, 0)
        module = self.load(name)
        if not names:
            return self.load(top)
        for each in names:
            if not hasattr(module, each) and _path_of(f"{name}.{each}") is not None:
                self.load(f"{name}.{each}")
        return module


_libraries: dict[tuple[Any, ...], Library] = {}


def library(patches: Patches) -> Library:
    """Return the modules with these changes, which all jobs share."""
    key = tuple(sorted(patches.items()))
    if key not in _libraries:
        _libraries[key] = Library(patches)
    return _libraries[key]


class _Replaced:
    """A system module: that of the process which runs now. Each has a class of its own."""

    def __init__(self, modules: Library, name: str) -> None:
        self._modules = modules
        self._name = name
        self._real = None if name == "simulated" else importlib.import_module(name)
        if name == "time":  # asked for ten thousand times in a job
            self.monotonic = self._monotonic

    def __getattr__(self, name: str) -> Any:
        modules, own = self._modules, self._name
        value = getattr(modules.system[own], name)
        if value is getattr(self._real, name, self):  # not simulated: all processes share it
            setattr(self, name, value)
        else:  # next time the class finds it, without an error first
            setattr(type(self), name, property(lambda _: getattr(modules.system[own], name)))
        return value

    def _monotonic(self) -> float:
        """Do what `Time.monotonic` of the process that runs now does."""
        modules = self._modules
        return modules.world.now + modules.owner.host.boot_offset


class _Logging(ModuleType):
    """`horovod.common.logging`: lines are part of the story."""

    def __init__(self, modules: Library) -> None:
        super().__init__("horovod.common.logging")
        self._logger = _Logger(modules)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_logging, name)

    def set_rank(self, rank: int) -> None:
        """The story has the worker's name."""

    def get_logger(self, name: str = "") -> _Logger:
        return self._logger

    def log_once(self, logger: _Logger, level: int, key: object, text: str, *args: Any) -> None:
        logger.log(level, text, *args)


class _Logger:
    def __init__(self, modules: Library) -> None:
        self._modules = modules

    def log(self, level: int, text: str, *args: Any, **_: Any) -> None:
        self._modules.process.tools.note(text % args if args else text)

    def __getattr__(self, level: str) -> Any:
        return lambda text, *args, **_: self.log(0, text, *args)

    def isEnabledFor(self, level: int) -> bool:
        return False


# -- sources ---------------------------------------------------------------------------------


def parse(name: str, patches: tuple[tuple[str, str], ...]) -> tuple[Path, ast.Module]:
    """Return a module's file, and its source after changes."""
    path = _path_of(name)
    if path is None:
        raise ModuleNotFoundError(f"No module named {name!r}")
    source = path.read_text(encoding="utf-8")
    for before, after in patches:
        if source.count(before) != 1:
            raise ValueError(f"{before!r} is {source.count(before)} times in {name}, not once")
        source = source.replace(before, after)
    return path, ast.parse(source)


class Compiled(NamedTuple):
    """A module that can be executed; libraries share it, as most have changed another one."""

    path: Path
    code: CodeType
    rebound: set[str]  # the variables that its functions rebind
    state: dict[str, CodeType]  # what it keeps for its process, and what makes it anew


@functools.cache
def compiled(name: str, patches: tuple[tuple[str, str], ...]) -> Compiled:
    """Return a module's source, after changes, in the form in which it is executed."""
    path, tree = parse(name, patches)
    state = {
        each: compile(ast.Expression(value), str(path), "eval")
        for each, value in find_state(tree).items()
    }
    return Compiled(path, compile(tree, str(path), "exec"), find_rebound(tree), state)


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and those inside of them: `ast.walk` looks at all expressions, too."""
    for node in nodes:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from _statements(getattr(node, field, ()))


def find_rebound(tree: ast.Module) -> set[str]:
    """Return the names of a module's variables that its functions rebind."""
    nodes = [node for node in _statements(tree.body) if isinstance(node, ast.Global)]
    return {name for node in nodes for name in node.names}


def find_state(tree: ast.Module) -> dict[str, ast.expr]:
    """Return what a module keeps for its process: names, and what they are at first."""
    rebound = find_rebound(tree)
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        (target,) = targets
        assert node.value is not None
        if isinstance(target, ast.Name) and (
            target.id in rebound or _is_state(node.value, classes)
        ):
            found[target.id] = node.value
    return found


def _is_state(value: ast.expr, classes: set[str]) -> bool:
    """Return whether a value is something that changes: a container, a lock, an own object."""
    if isinstance(value, (ast.List, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func)
    is_own = name in classes and not value.args and not value.keywords
    module, _, attribute = name.rpartition(".")
    return is_own or module in ("threading", "weakref") or attribute in _CONTAINERS


@functools.cache
def _path_of(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.exists():
            return path
    return None


@functools.cache
def _imports(name: str) -> frozenset[str]:
    """Return what a module imports, wherever the statement is."""
    path = _path_of(name)
    if path is None:
        return frozenset()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


@functools.cache
def _uses_the_system(name: str) -> bool:
    """Return whether a module, or one that it imports, needs what is simulated."""
    return _reaches_the_system(name, set())


def _reaches_the_system(name: str, seen: set[str]) -> bool:
    seen.add(name)
    for imported in _imports(name):
        top = imported.partition(".")[0]
        if imported in REPLACED or imported == "horovod.common.logging":
            return True
        is_ours = top in _OURS and imported not in seen and _path_of(imported) is not None
        if is_ours and _reaches_the_system(imported, seen):
            return True
    return False
