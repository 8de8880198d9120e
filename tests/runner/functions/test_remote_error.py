"""Exceptions of remote functions: of their own class, and RuntimeErrors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import horovod
from horovod.runner.functions.function_call import FAILED, RemoteError, as_runtime_error


class WithAttributes(KeyError):
    """An exception with a constructor of its own."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint

    def __reduce__(self) -> Any:
        return _remade, (self.code, self.hint)


def _remade(code: int, hint: str) -> WithAttributes:
    return WithAttributes(code, hint=hint)


class Unwilling(Exception):
    def __new__(cls, *arguments: object) -> Any:
        if cls is not Unwilling:
            raise TypeError("no subclasses")
        return super().__new__(cls, *arguments)


CASES: list[Exception] = [
    ZeroDivisionError("division by zero"),
    ValueError("no", 3),
    KeyError("missing"),
    RuntimeError("one already"),
    FileNotFoundError(2, "No such file", "/nowhere"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start"),
    ImportError("no module", name="gone", path="/tmp"),
    StopIteration(7),
    NotImplementedError(),
    AssertionError("why"),
]


@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
def test_every_exception_is_itself_and_a_runtime_error(error: Exception):
    made = as_runtime_error(error)
    assert isinstance(made, type(error))
    assert isinstance(made, RuntimeError)
    assert str(made).startswith(str(error))
    assert FAILED in str(made)
    assert made.args == error.args
    assert type(made).__name__ == type(error).__name__
    for name in ("filename", "errno", "object", "name", "path", "value", "reason"):
        assert getattr(made, name, None) == getattr(error, name, None)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(error)


def test_attributes_come_along():
    made = as_runtime_error(WithAttributes(5, hint="turn it off"))
    assert isinstance(made, WithAttributes)
    assert isinstance(made, RuntimeError)
    assert (made.code, made.hint) == (5, "turn it off")


def test_a_class_that_cannot_be_derived_from_stays_as_it_is():
    error = Unwilling("x")
    assert as_runtime_error(error) is error


def _fails() -> None:
    raise FileNotFoundError(2, "No such file", "/nowhere")


def test_horovod_run_raises_both():
    with pytest.raises(FileNotFoundError) as raised:
        horovod.run(_fails, num_proc=1)
    assert isinstance(raised.value, RuntimeError)
    assert FAILED in str(raised.value)
    assert raised.value.filename == "/nowhere"
    assert isinstance(raised.value.__cause__, RemoteError)
    assert FAILED in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match=FAILED):
        horovod.run(_killed, num_proc=1)


def _killed() -> None:
    import os

    os.kill(os.getpid(), 9)
