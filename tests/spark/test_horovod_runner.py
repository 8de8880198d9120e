"""``HorovodRunner`` as programs for sparkdl use it: in Spark tasks, and on the driver alone."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from horovod.spark import HorovodRunner, log_to_driver
from horovod.spark.horovod_runner import _MarkedLines
from tests.spark import functions

pytestmark = pytest.mark.timeout(900)  # a busy machine may take minutes to start the cluster


def chat(text: str) -> int:
    """Write and log; every rank returns something else."""
    print("only with all", text)
    log_to_driver(f"{text}\nfrom rank {functions.rank()}")
    return 10 + functions.rank()


def test_in_spark_tasks_with_what_they_log(spark: Any, capsys: pytest.CaptureFixture[str]):
    assert HorovodRunner(np=2).run(chat, text="hello") == 10
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["from rank 0", "from rank 1", "hello", "hello"]
    assert "]<" not in shown.err


def test_all_slots_and_all_output(whole: Any, capsys: pytest.CaptureFixture[str]):
    runner = HorovodRunner(np=0, driver_log_verbosity="all")
    assert runner.run(functions.place)["size"] == 4
    assert runner.run(chat, text="hi") == 10
    assert "[3]<stdout>:only with all hi\n" in capsys.readouterr().out


def test_an_error_is_raised_as_itself(spark: Any):
    with pytest.raises(functions.Unhappy, match="on purpose"):
        HorovodRunner(np=2).run(functions.fail, who=1)


def test_on_the_driver_without_spark(capfd: pytest.CaptureFixture[str]):
    assert HorovodRunner(np=-2).run(chat, text="here") == 10
    shown = capfd.readouterr().out
    assert sorted(re.findall(r"^\[1\]<stdout>:(.*)$", shown, re.MULTILINE)) == [
        *("from rank 1", "here", "only with all here"),
    ]
    with pytest.raises(functions.Unhappy, match="on purpose"):
        HorovodRunner(np=-1).run(functions.fail, who=0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"np": "2"}, "np must be a whole number, not '2'"),
        ({"np": True}, "np must be a whole number"),
        ({"np": 2, "driver_log_verbosity": "most"}, "driver_log_verbosity must be 'all' or"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], why: str):
    with pytest.raises(ValueError, match=why):
        HorovodRunner(**arguments)
    with pytest.raises(ValueError, match="main must be a function"):
        HorovodRunner(np=-1).run("train")  # type: ignore[arg-type]


def test_long_messages_are_cut(capsys: pytest.CaptureFixture[str]):
    log_to_driver("x" * 5000)
    assert capsys.readouterr().out == "x" * 4000 + "...\n"


def test_lines_arrive_whole_however_they_were_cut():
    target = io.StringIO()
    lines = _MarkedLines(target, "w0rd")
    for piece in ("[0]<stdout>:w0", "rdone\n[1]<std", "out>:two\nhorovod.spark: three\n[2]"):
        lines.write(piece)
    assert target.getvalue() == "one\nhorovod.spark: three\n"
