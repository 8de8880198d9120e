"""docs/keras.md: what it tells people to write runs, on every Keras and backend that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import check_home_sample
from tests.keras.flavours import FLAVOURS, QUICK
from tests.tensorflow.pages import DOCS, run_page, sections_that_train


def _imports_of_tf_keras() -> tuple[str, str]:
    """What the page says to import, and what instead of it for tf.keras."""
    page = (DOCS / "keras.md").read_text()
    (instead,) = re.findall(
        r"^For `tf.keras` the imports .*\n\n((?:    .*\n)+)", page, re.MULTILINE
    )
    return "import keras\nimport horovod.keras as hvd\n", instead.replace(" " * 4, "")


@pytest.mark.parametrize("flavour", list(FLAVOURS))
def test_the_keras_page(tmp_path: Path, flavour: str):
    replace = _imports_of_tf_keras() if flavour == "tf_keras" else None
    states, other = run_page("keras.md", tmp_path, FLAVOURS[flavour] | QUICK, replace)
    assert states[0]["backend"] == FLAVOURS[flavour].get("KERAS_BACKEND", "tensorflow")
    assert sections_that_train(states) >= {
        "Checkpoints and load_model",
        "Order of the optimizer",
        "Accumulating gradients",
        "Mixed precision",
    }
    assert states[0]["fitted"] == other[0]["fitted"] > 0.7
    loaded = next(s for s in states if s["section"] == "Checkpoints and load_model")
    assert loaded["steps_done"] == 4 * 8  # epochs of 256 / 32 steps
    assert states[-1]["accuracy"] == other[-1]["accuracy"]


def test_the_sample_of_the_home_page():
    check_home_sample("Keras", FLAVOURS["tensorflow"])
