"""Whether a training step finds the memory that the one before has freed."""

from __future__ import annotations

import ctypes
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd
from horovod.engine.execution.heap import is_tuned, join_pages
from tests.ranks import run_ranks

BLOCKS, MEBIBYTES, STEPS = 4, 24, 5
PAGES = BLOCKS * MEBIBYTES * 256
HUGE = 512  # pages in a huge one

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="this is about glibc")


def _faults_of_a_step(rank: int, size: int) -> float:
    """Pages that the system has to supply each time that some blocks are used and freed."""
    hvd.init()
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
    nbytes = ctypes.c_size_t(MEBIBYTES << 20)

    def step() -> None:
        blocks = [ctypes.c_void_p(libc.malloc(nbytes)) for _ in range(BLOCKS)]
        for block in blocks:
            libc.memset(block, 1, nbytes)
        for block in blocks:
            libc.free(block)

    def count() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    for _ in range(3):
        step()
    before = count()
    for _ in range(STEPS):
        step()
    return (count() - before) / STEPS


def test_a_step_finds_the_memory_of_the_one_before_unless_the_user_tells_glibc_otherwise():
    (kept,) = run_ranks(_faults_of_a_step, 1)
    (given_back,) = run_ranks(_faults_of_a_step, 1, env={"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert given_back > PAGES / HUGE / 2  # a glibc of today may ask for huge pages by itself
    assert kept < given_back / 4


def _join(rank: int, size: int, nbytes: int) -> tuple[int, int, bool]:
    """How many huge pages were made, how many the heap has, and if a tensor is unchanged."""
    hvd.init()
    tensor = torch.arange(nbytes // 8)
    joined = join_pages()
    found = _huge_pages_of_heap()
    unchanged = torch.equal(tensor, torch.arange(nbytes // 8))
    return joined, found, unchanged


def _huge_pages_of_heap() -> int:
    _, _, heap = Path("/proc/self/smaps").read_text().partition("[heap]\n")
    sizes = re.findall(r"AnonHugePages: +(\d+) kB", heap)
    return int(sizes[0]) // 2048 if sizes else 0


def test_the_heap_is_put_on_huge_pages():
    ((joined, found, unchanged),) = run_ranks(_join, 1, 12 << 20)
    assert unchanged
    if not joined:
        pytest.skip("the system has no huge pages to give")
    assert found >= joined >= 1


# In the main thread, whose allocations are the ones in the heap.
HARDLY_USED = """
import torch
import horovod.torch as hvd
from horovod.engine.execution.heap import join_pages

def resident() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

hvd.init()
used = torch.ones(16 << 20, dtype=torch.uint8)
hardly_used = torch.empty(16 << 20, dtype=torch.uint8)
hardly_used[:: 1 << 20] = 1
before = resident()
print(join_pages(), resident() - before)
"""


def test_huge_pages_take_no_more_memory():
    done = subprocess.run(
        [sys.executable, "-c", HARDLY_USED], capture_output=True, text=True, check=True
    )
    joined, kibibytes = map(int, done.stdout.split())
    if not joined:
        pytest.skip("the system has no huge pages to give")
    assert kibibytes < 2048


def test_huge_pages_are_not_for_a_heap_that_is_not_kept():
    ((joined, _, unchanged),) = run_ranks(_join, 1, 12 << 20, env={"MALLOC_TOP_PAD_": "0"})
    assert unchanged
    assert joined == 0


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
