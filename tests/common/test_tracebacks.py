"""Our own frames are one line of a traceback, unless somebody debugs."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.common.logging import get_logger
from horovod.common.tracebacks import format_error


def _caught(function) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error")


def _lose() -> None:
    hvd.allreduce(torch.ones(2))  # not initialised


def test_frames_of_this_package_become_one_line():
    error = _caught(_lose)
    assert isinstance(error, HorovodInternalError)
    text = format_error(error)
    assert "hvd.allreduce(torch.ones(2))  # not initialised" in text
    assert text.count("/horovod/") == 1
    assert "calls inside horovod; HOROVOD_LOG_LEVEL=debug shows them)" in text
    assert text.endswith(f"HorovodInternalError: {error}\n")


def test_where_the_error_may_be_ours_its_place_stays():
    error = _caught(lambda: hvd.broadcast_object(1, process_set=hvd.ProcessSet([0])))
    assert type(error) is ValueError
    frames = [line for line in format_error(error).splitlines() if line.startswith("  File ")]
    assert len(frames) == 4  # here twice, the folded ones, and the last
    assert "in unregistered" in frames[-1] or "in set_id" in frames[-1]


def test_what_it_was_raised_from_is_folded_too():
    def raise_another() -> None:
        try:
            _lose()
        except HorovodInternalError as error:
            raise RuntimeError("stopped") from error

    text = format_error(_caught(raise_another))
    assert text.count("/horovod/") == 2  # one line, and the place where it was raised
    assert "direct cause" in text


def test_all_frames_are_there_for_those_who_debug():
    error = _caught(_lose)
    level = get_logger().level
    get_logger().setLevel(logging.DEBUG)
    try:
        text = format_error(error)
    finally:
        get_logger().setLevel(level)
    assert text.count("/horovod/") > 2
    assert "inside horovod" not in text


def test_a_device_that_the_process_does_not_see_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as --gpus-per-task=1 leaves it

    def choose_the_device_of_local_rank_3() -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    text = format_error(_caught(choose_the_device_of_local_rank_3))
    assert "sees one GPU, which is device 0" in text
    assert text.endswith("set_device(hvd.local_rank() % torch.cuda.device_count())\n")


@pytest.mark.parametrize("before", ["", "sys.excepthook = print"])
def test_init_installs_it_where_nobody_else_did(before: str):
    end = "hvd.init(); print(sys.excepthook.__module__)"
    program = f"import sys, horovod.torch as hvd\n{before}\n{end}"
    found = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    wanted = b"builtins" if before else b"horovod.common.tracebacks"
    assert found.stdout.strip() == wanted


def test_other_errors_look_as_ever():
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    import traceback

    assert format_error(caught.value) == "".join(traceback.format_exception(caught.value))
