"""Which lines of a worker's stderr a person sees after Ctrl-C."""

from __future__ import annotations

import pytest

from horovod.runner.output.lines import InterruptFilter, LineSplitter

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    time.sleep(100)

{}
"""
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"


def _shown(text: str) -> str:
    """What is left of a stream that was fed in pieces and has ended."""
    splitter, one = LineSplitter(), InterruptFilter()
    lines = []
    for start in range(0, len(text), 7):
        lines += one.feed(splitter.feed(text[start : start + 7].encode()))
    lines += one.feed(splitter.finish()) + one.finish()
    return b"".join(line.text + line.end for line in lines).decode()


@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK.format("KeyboardInterrupt"),
        TRACEBACK.format("KeyboardInterrupt").rstrip("\n"),
        TRACEBACK.format("horovod.common.exceptions.PeerLostError: rank 1 has ended"),
        TRACEBACK.format("ValueError: 3") + CHAIN + TRACEBACK.format("KeyboardInterrupt"),
        TRACEBACK.format("KeyboardInterrupt") * 2,
        "Exception ignored in: <module 'threading'>\n" + TRACEBACK.format("KeyboardInterrupt: "),
        "Process ForkProcess-1:\n" + TRACEBACK.format("KeyboardInterrupt"),
    ],
)
def test_what_an_interrupt_explains_is_left_out(text: str):
    assert _shown(f"before\n{text}") == "before\n"


@pytest.mark.parametrize(
    "text",
    [
        "saving a checkpoint\n\n  done\n",
        TRACEBACK.format("OSError: no space left on device"),
        TRACEBACK.format("KeyboardInterrupt") + CHAIN + TRACEBACK.format("OSError: full"),
        TRACEBACK.partition("{}")[0],  # killed in the middle
        "Exception ignored in: nothing that follows\n",
    ],
)
def test_everything_else_is_shown(text: str):
    assert _shown(text) == text


def test_what_follows_is_shown_again():
    text = TRACEBACK.format("KeyboardInterrupt") + "bye\n"
    assert _shown(text) == "bye\n"
