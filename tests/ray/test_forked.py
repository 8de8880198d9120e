"""What makes the other tests fast: programs of Ray that are forked from one that has loaded it."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.forked_python import forked_python

pytestmark = pytest.mark.timeout(900)

PROGRAM = """
import os, sys
assert "ray.train" in sys.modules
import ray
from ray.data._internal.memory_tracing import _MemActor
print(ray._raylet.PlacementGroupID.of(ray.JobID.from_int(1)).hex())
"""


@pytest.mark.usefixtures("ray_files")
def test_each_chooses_names_of_its_own():
    names = {
        subprocess.run(
            [*forked_python(), "-c", PROGRAM],
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(names) == 2
