"""Workers and the GPUs that Ray gives them.

Ray counts GPUs as it is told to: a node says that it has four, and nobody looks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from horovod.ray import RayExecutor
from horovod.ray.elastic import RayHostDiscovery
from tests.ray.conftest import add_node, remove_node

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def node(cluster: Any) -> Iterator[str]:
    """A node with four GPUs; its identity."""
    added = add_node(cluster, num_cpus=4, num_gpus=4)
    yield added.node_id
    remove_node(cluster, added)


def devices() -> dict[str, Any]:
    """What a script goes by when it says `torch.cuda.set_device(hvd.local_rank())`."""
    import horovod.torch as hvd

    hvd.init()
    try:
        return {
            "rank": hvd.rank(),
            "node": ray.get_runtime_context().get_node_id(),
            "own": [str(gpu) for gpu in ray.get_gpu_ids()],
            "chosen": os.environ["CUDA_VISIBLE_DEVICES"].split(",")[hvd.local_rank()],
        }
    finally:
        hvd.shutdown()


def start(**how: Any) -> RayExecutor:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), use_gpu=True, **how)
    executor.start()
    return executor


def check(found: list[dict[str, Any]], node: str, count: int) -> None:
    assert [one["rank"] for one in found] == list(range(count))
    assert {one["node"] for one in found} == {node}
    assert len({one["chosen"] for one in found}) == count, "no two ranks on one GPU"
    for one in found:
        assert [one["chosen"]] == one["own"], "the GPU that Ray has given to this very rank"


def test_each_rank_finds_its_own_at_its_local_rank(node: str):
    executor = start(num_workers=3)
    found = executor.run(devices)
    executor.shutdown()
    check(found, node, 3)


def test_elastic_ones_too(node: str):
    check(start(min_workers=2, max_workers=2).run(devices), node, 2)


def test_several_for_each_worker(node: str):
    executor = start(num_hosts=1, num_workers_per_host=2, gpus_per_worker=2)
    found = executor.run(lambda: (ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]))
    executor.shutdown()
    own = [gpu for gpus, _ in found for gpu in gpus]
    assert sorted(map(int, own)) == [0, 1, 2, 3]
    assert {visible for _, visible in found} == {",".join(map(str, own))}


def test_hosts_with_gpus_are_found(node: str):
    discovery = RayHostDiscovery(use_gpu=True, gpus_per_slot=2)
    ((name, slots),) = discovery.find_available_hosts_and_slots().items()
    assert slots == 2
    assert discovery.node_of(name)["NodeID"] == node  # type: ignore[index]


def test_more_than_there_are(node: str):
    settings = RayExecutor.create_settings(timeout_s=300, placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=5, use_gpu=True)
    with pytest.raises(TimeoutError, match=r"1 GPU.*The cluster has"):
        executor.start()
