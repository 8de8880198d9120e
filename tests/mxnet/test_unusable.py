"""Where MXNet cannot be used, its tests are skipped with the reason, and importing says why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mxnet.conftest import REASON


def test_the_binding_says_what_it_needs():
    if REASON is None:
        pytest.skip("MXNet is here: the other tests of this directory run")
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.mxnet"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "ImportError: horovod.mxnet needs MXNet 1.9.1 with numpy 1.23.5" in done.stderr
    assert "pip install 'horovod[mxnet]'" in done.stderr


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_the_other_tests_run():
    import horovod.mxnet  # noqa: F401
