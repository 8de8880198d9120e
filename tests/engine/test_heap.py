"""Whether a training step finds the memory that the one before has freed."""

from __future__ import annotations

import itertools
import resource
import sys

import pytest
import torch

import horovod.torch as hvd
from horovod.engine.heap import is_tuned
from tests.ranks import run_ranks

STEPS = 5


def _faults_of_a_step(rank: int, size: int) -> float:
    """Pages that the system has to supply in each step of a model of 13 MB."""
    hvd.init()
    sizes = (512, 1024, 1024, 1024, 512)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8, 512)).sum().backward()
        optimizer.step()

    def count() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    for _ in range(3):
        step()
    before = count()
    for _ in range(STEPS):
        step()
    return (count() - before) / STEPS


@pytest.mark.skipif(sys.platform != "linux", reason="this is about glibc")
def test_a_step_finds_the_memory_of_the_one_before():
    (faults,) = run_ranks(_faults_of_a_step, 1)
    assert faults < 300, "of some 3,000 pages"


@pytest.mark.skipif(sys.platform != "linux", reason="this is about glibc")
def test_what_the_user_tells_glibc_is_left_alone():
    (faults,) = run_ranks(_faults_of_a_step, 1, env={"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert faults > 500


@pytest.mark.parametrize(
    ("environ", "tuned"),
    [
        ({}, False),
        ({"MALLOC_TOP_PAD_": "0"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, True),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, False),
    ],
)
def test_how_users_tell_glibc(environ: dict[str, str], tuned: bool):
    assert is_tuned(environ) is tuned
