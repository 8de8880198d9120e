"""Read a YAML file that sets what the tunable options set: ``horovodrun --config-file``.

`arguments` calls `read_config_file`. The keys are those of the rows in `tunables`, and
``controller``; values are checked like the options' arguments. A mistake is a `ValueError` that
names file and line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from horovod.runner.options.tunables import TUNABLES, Tunable

CONTROLLER = "controller"
CONTROLLERS = ("gloo", "mpi")
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class _Entry:
    """One ``key: value`` of the file."""

    key: str  # with its section: params.cycle_time_ms
    line: int
    node: Any  # the YAML node of the value

    @property
    def empty(self) -> bool:
        return bool(self.node.tag == _NULL)


def read_config_file(path: str) -> dict[str, Any]:
    """Read the file.

    Returns:
        The values, by the attribute of the options that each sets, and ``controller``.

    Raises:
        ValueError: If the file cannot be read, or has a mistake; the message names the line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f"cannot read {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    values: dict[str, Any] = {}
    given: dict[str, _Entry] = {}
    for entry in _entries(path, text):
        try:
            name, value = _value(entry)
        except ValueError as error:
            raise ValueError(f"{path}, line {entry.line}: {entry.key}: {error}") from None
        if name in given:
            first = given[name]
            raise ValueError(
                f"{path}, line {entry.line}: {entry.key} repeats {first.key} of line {first.line}"
            )
        given[name] = entry
        if value is not None:
            values[name] = value
    return values


def schema() -> dict[str, Tunable | None]:
    """Return every key that the file may have, and the option that it stands for."""
    keys: dict[str, Tunable | None] = {CONTROLLER: None}
    for row in TUNABLES:
        keys.update({key: row for key in (row.key, row.inverse_key) if key})
    return keys


def _entries(path: str, text: str) -> Iterator[_Entry]:
    """Return the entries of the file in order; raise `ValueError` at the first unknown key."""
    import yaml  # takes longer to import than the launcher otherwise takes to start

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else path
        raise ValueError(f"{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    if root is None:
        return
    keys = schema()
    sections = dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)
    for entry in _items(path, root, ""):
        if entry.key in keys:
            yield entry
        elif entry.key not in sections:
            raise ValueError(_unknown(path, entry, [CONTROLLER, *sections]))
        elif not entry.empty:
            for inner in _items(path, entry.node, f"{entry.key}."):
                if inner.key not in keys:
                    within = [key for key in keys if key.startswith(f"{entry.key}.")]
                    raise ValueError(_unknown(path, inner, within))
                yield inner


def _items(path: str, node: Any, prefix: str) -> list[_Entry]:
    if node.id != "mapping":
        where = f"{path}, line {node.start_mark.line + 1}"
        what = prefix.removesuffix(".") or "the file"
        raise ValueError(f"{where}: {what} must hold lines of the form 'key: value'")
    return [
        _Entry(
            f"{prefix}{key.value if key.id == 'scalar' else '?'}", key.start_mark.line + 1, value
        )
        for key, value in node.value
    ]


def _unknown(path: str, entry: _Entry, known: list[str]) -> str:
    """Return a message about an unknown key, which may be misspelt or in the wrong section."""
    name = entry.key.rpartition(".")[2]
    elsewhere = [key for key in schema() if key.rpartition(".")[2] == name]
    here = [key.rpartition(".")[2] for key in known]
    likely = elsewhere or difflib.get_close_matches(name, here, n=1)
    hint = f"did you mean {likely[0]!r}?" if likely else f"known here are {', '.join(here)}"
    return f"{path}, line {entry.line}: unknown key {entry.key!r}; {hint}"


def _value(entry: _Entry) -> tuple[str, Any]:
    """Return the attribute that an entry sets, and its value; None for an empty one."""
    row = schema()[entry.key]
    if entry.node.id != "scalar":
        raise ValueError("must be a single value")
    if row is None:
        controller = entry.node.value.lower()
        if not entry.empty and controller not in CONTROLLERS:
            raise ValueError(f"{entry.node.value!r} is not one of {', '.join(CONTROLLERS)}")
        return CONTROLLER, None if entry.empty else controller
    if entry.empty:
        return row.dest, None
    value = row.parse(entry.node.value)
    return row.dest, not value if entry.key == row.inverse_key else value
