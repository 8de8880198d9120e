"""Log lines, as a program of a user's sees them (in a process without pytest's handlers)."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

from horovod.common.logging import get_logger, log_once


def run(program: str, **environ: str) -> tuple[str, str]:
    """stdout and stderr of a program."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return result.stdout, result.stderr


ALL_LEVELS = """
from horovod.common.logging import TRACE, get_logger, set_rank
log = get_logger("horovod.x")
set_rank(3)
log.log(TRACE, "t %d", 1)
log.debug("d"); log.info("i"); log.warning("w"); log.error("e"); log.critical("f")
"""


def test_form_of_a_line() -> None:
    _, err = run("import horovod.common.logging as l\nl.set_rank(12)\nl.get_logger().error('a b')")
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: E <string>:3\] \[12\]: a b\n", err
    )


def test_without_time_and_rank() -> None:
    _, err = run(
        "import horovod.common.logging as l\nl.get_logger().error('a')", HOROVOD_LOG_HIDE_TIME="1"
    )
    assert err == "[E <string>:2]: a\n"


def test_levels_and_streams() -> None:
    out, err = run(ALL_LEVELS, HOROVOD_LOG_LEVEL="TRACE", HOROVOD_LOG_HIDE_TIME="1")
    assert [line[1] + line[-2:].strip() for line in out.splitlines()] == ["T1", "Dd", "Ii"]
    assert [line[1] + line[-1] for line in err.splitlines()] == ["Ww", "Ee", "Ff"]


def test_default_level_is_warning() -> None:
    for level in ("", "nonsense", "warning"):
        out, err = run(ALL_LEVELS, HOROVOD_LOG_LEVEL=level)
        assert out == ""
        assert len(err.splitlines()) == 3


def test_level_set_between_import_and_init() -> None:
    program = """
import os
from horovod.common.logging import get_logger, set_rank
log = get_logger()
os.environ["HOROVOD_LOG_LEVEL"] = "info"
set_rank(0)
log.info("seen")
"""
    assert "seen" in run(program, HOROVOD_LOG_LEVEL="")[0]


def test_level_given_by_the_program_stays() -> None:
    program = """
import logging
from horovod.common.logging import get_logger, set_rank
logging.getLogger("horovod").setLevel(logging.ERROR)
set_rank(0)
get_logger().warning("hidden")
"""
    assert run(program, HOROVOD_LOG_LEVEL="debug") == ("", "")


def test_handlers_of_the_program_are_used_instead_of_ours() -> None:
    program = """
import logging, sys
from horovod.common.logging import get_logger
{first}
logging.getLogger("horovod").addHandler(logging.StreamHandler(sys.stdout))
get_logger("horovod.x").error("once")
"""
    for first in ("", "get_logger()"):
        assert run(program.format(first=first)) == ("once\n", "")


def test_exception_is_shown() -> None:
    program = """
from horovod.common.logging import get_logger
try:
    1 / 0
except ZeroDivisionError:
    get_logger().exception("failed")
"""
    err = run(program)[1]
    assert ": failed\nTraceback" in err
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_log_once() -> None:
    log = get_logger("horovod.test_log_once")
    assert log_once(log, logging.INFO, "test_log_once", "first")
    assert not log_once(log, logging.INFO, "test_log_once", "second")
    assert log_once(log, logging.INFO, "test_log_once other", "third")
