"""What goes wrong is said: what happened, on which rank, and what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import horovod.jax as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.jax.conftest import jax_pool
from tests.ranks import RankPool, listen, run_ranks, start_ranks, tell


def _trees_that_differ() -> list[str]:
    rank = hvd.rank()
    messages = []
    mine = {"same": jnp.ones(2), "b" if rank else "a": {"w": jnp.ones(3)}}
    shaped = {"w": jnp.ones((2, 2 + rank)), "b": jnp.ones(2)}
    typed = [jnp.ones(2), jnp.ones(2, jnp.int32 if rank else jnp.float32)]
    shuffled = {"x": jnp.ones(1), "y": jnp.ones(1)} if rank else [jnp.ones(1), jnp.ones(1)]
    for function, tree in [
        (hvd.allreduce, mine),
        (hvd.allreduce, shaped),
        (hvd.allreduce, typed),
        (hvd.allreduce, shuffled),
        (hvd.allgather, mine),
        (hvd.reducescatter, shaped),
        (lambda tree: hvd.broadcast_parameters(tree, 0), shaped),
        (hvd.alltoall, {"x" if rank else "y": jnp.ones(2), "z": jnp.ones(2)}),
    ]:
        with pytest.raises(HorovodInternalError) as error:
            function(tree)
        messages.append(str(error.value))
        assert __file__.rpartition("/")[2] in messages[-1]
    return messages


def test_trees_that_differ_between_ranks(jax_pool2: RankPool):
    first, second = jax_pool2.run(_trees_that_differ)
    assert first == second  # all ranks say the same
    names, shapes, types, structures, gathered, scattered, sent, exchanged = first
    for message in (names, gathered):
        assert "mismatched tree between ranks" in message
        assert "['a']['w'] float32" in message
        assert "['b']['w'] float32" in message
        assert "['same']" not in message  # what they have in common is of no interest
    for message in (shapes, scattered, sent):
        assert "['w'] float32[2, 2] on rank 0" in message
        assert "['w'] float32[2, 3] on rank 1" in message
    assert "[1] float32[2] on rank 0" in types
    assert "[1] int32[2] on rank 1" in types
    assert "[0] float32[1], [1] float32[1] on rank 0" in structures
    assert "['y'] float32" in exchanged
    assert "['x'] float32" in exchanged


def _compiled_trees_that_differ() -> str:
    @jax.jit
    def step(tree: Any) -> Any:
        return hvd.allreduce(tree)

    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(step({"b" if hvd.rank() else "a": jnp.ones(3)}))
    hvd.barrier()  # the next program begins anew, on all ranks
    assert step({"same": jnp.ones(2)})["same"].tolist() == [1, 1]  # and it goes on
    return str(error.value)


def test_compiled_trees_that_differ(jax_pool2: RankPool):
    first, second = jax_pool2.run(_compiled_trees_that_differ)
    for message in (first, second):
        assert "HorovodInternalError: 'allreduce.jit': mismatched tree between ranks" in message
        assert "['a'] float32[3] on rank 0" in message
        assert "['b'] float32[3] on rank 1" in message
        assert "test_errors.py" in message  # the line of the script, not of JAX


def _compiled_rows_that_differ() -> str:
    step = jax.jit(hvd.allgather)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(step(jnp.ones((1 + hvd.rank(), 2))))
    hvd.barrier()  # the next program begins anew, on all ranks
    return str(error.value)


def test_compiled_allgather_needs_equal_rows(jax_pool2: RankPool):
    for message in jax_pool2.run(_compiled_rows_that_differ):
        assert "the array of shape [1, 2]" in message
        assert "the array of shape [2, 2]" in message


def _wrong_arguments() -> None:
    x = jnp.ones(3)
    for call, message in [
        (lambda: hvd.allreduce("text"), "expected an array or a number, not str"),
        (lambda: hvd.allreduce({"a": {"b": object()}}), r"at \['a'\]\['b'\], not object"),
        (lambda: hvd.allreduce(jax.random.key(0)), "broadcast_parameters takes random keys"),
        (lambda: hvd.allreduce(jnp.uint32([1])), "not defined for tensors of type torch.uint32"),
        (lambda: hvd.allreduce(jnp.ones(1, jnp.float8_e4m3fn)), "float8_e4m3fn"),
        (lambda: hvd.allreduce(jnp.bool_([1])), "Average is not defined"),
        (lambda: jax.jit(hvd.allreduce)(jnp.bool_([1])), "Average is not defined"),
        (lambda: hvd.allreduce(x, op=hvd.Sum, average=True), "average"),
        (lambda: hvd.allreduce(x, op=9), "9"),
        (lambda: hvd.grouped_allreduce(x), "a list of arrays, not one array"),
        (lambda: hvd.grouped_allgather([]), "at least one array"),
        (lambda: hvd.allgather(jnp.float32(1)), "at least one dimension"),
        (lambda: jax.jit(hvd.allgather)(jnp.float32(1)), "at least one dimension"),
        (lambda: jax.jit(hvd.reducescatter)(jnp.float32(1)), "at least one dimension"),
        (lambda: hvd.broadcast(x, 7), r"root rank 7 is not in the process set.*\[0, 1\]"),
        (lambda: jax.jit(lambda x: hvd.broadcast(x, 7))(x), "root rank 7 is not in"),
        (lambda: hvd.alltoall(x), "divisible by 2, got 3"),
        (lambda: jax.jit(hvd.alltoall)(x), "divisible by 2, got 3"),
        (lambda: hvd.alltoall(x, splits=[1, 3]), "sum up to 4"),
        (lambda: hvd.alltoall(x, splits=jnp.float32([1, 1])), "must be of type int32"),
        (lambda: jax.jit(lambda x: hvd.alltoall(x, splits=[1, 2]))(x), "takes no splits"),
        (lambda: jax.jit(hvd.allreduce_async)(x), "without _async"),
        (lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0])), "is not registered"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="vmap has no meaning for allgather"):
        jax.vmap(hvd.allgather)(jnp.ones((2, 2)))
    with pytest.raises(HorovodInternalError, match="takes Sum or Average"):
        hvd.reducescatter(x, op=hvd.Max)
    hvd.barrier()  # nothing was left behind


def test_wrong_arguments(jax_pool2: RankPool):
    jax_pool2.run(_wrong_arguments)


def test_a_name_is_taken_until_the_operation_is_done(jax_pool2: RankPool):

    def run() -> None:
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(jnp.ones(1), name="twice")
            with pytest.raises(ValueError, match=r"'allreduce.twice' was submitted at"):
                hvd.allreduce_async(jnp.ones(1), name="twice")
            hvd.broadcast_object(None)
        else:
            hvd.broadcast_object(None)
            handle = hvd.allreduce_async(jnp.ones(1), name="twice")
        assert hvd.synchronize(handle).item() == 1

    jax_pool2.run(run)


def _unordered() -> float:
    from jax.experimental import io_callback

    form = jax.ShapeDtypeStruct((), jnp.float32)

    def on_host(x: Any) -> Any:
        return np.asarray(hvd.allreduce(np.asarray(x), op=hvd.Sum))

    def named(x: Any) -> Any:
        return np.asarray(hvd.allreduce(np.asarray(x), name="mine", op=hvd.Sum))

    with pytest.raises(jax.errors.JaxRuntimeError, match="XLA runs in any order: call Horovod's"):
        jax.block_until_ready(jax.jit(lambda x: io_callback(on_host, form, x))(jnp.float32(1)))
    return jax.jit(lambda x: io_callback(named, form, x))(jnp.float32(1)).item()


def test_callbacks_without_an_order(jax_pool2: RankPool):
    assert jax_pool2.run(_unordered) == [2.0] * 2


def _several_devices() -> None:
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("x",))
    spread = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("x")))
    with pytest.raises(
        ValueError, match=r"at \['w'\] is sharded over 2 devices on rank \d, and a Horovod rank has"
    ):
        hvd.allreduce({"w": spread})
    with pytest.raises(ValueError, match=r"compiled for 2 devices.*cannot be ordered"):
        jax.jit(hvd.allreduce)(spread)
    inner = jax.shard_map(
        hvd.allreduce, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
    )
    with pytest.raises(ValueError, match=r"compiled for 2 devices.*pmap and shard_map"):
        jax.jit(inner)(spread)
    second = jax.device_put(jnp.ones(2), jax.devices()[1])  # one device, but another
    assert hvd.allreduce(second).tolist() == [1, 1]
    assert jax.jit(hvd.allreduce)(second).devices() == {jax.devices()[1]}


def test_arrays_on_several_devices():
    for pool in jax_pool(2, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}):
        pool.run(_several_devices)


def _before_init(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="not initialised"):
        hvd.size()
    with pytest.raises(HorovodInternalError, match="not initialised"):
        hvd.allreduce(jnp.ones(1))
    with pytest.raises(HorovodInternalError, match="not initialised"):
        jax.jit(hvd.allreduce)(jnp.ones(1))
    hvd.init()
    step = jax.jit(hvd.allreduce)
    assert step(jnp.ones(1)).item() == 1
    hvd.shutdown()
    # Older versions of JAX trace it again, and then it is our own error.
    errors = (jax.errors.JaxRuntimeError, HorovodInternalError)
    with pytest.raises(errors, match="not initialised"):
        jax.block_until_ready(step(jnp.ones(1)))
    hvd.init()
    assert step(jnp.ones(1)).item() == 1  # what failed is forgotten


def test_before_init_and_after_shutdown(jax_pool2: RankPool):
    run_ranks(_before_init, 2, timeout=240)


def _lost(rank: int, size: int) -> str:
    hvd.init()
    step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    step(jnp.ones(3)).block_until_ready()
    if rank == 1:
        listen()  # it is killed here
    tell("has stepped")
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        step(jnp.ones(3)).block_until_ready()
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(jnp.ones(3))
    return str(error.value)


def test_a_rank_that_dies_in_a_compiled_step():
    with start_ranks(_lost, 2) as ranks:
        ranks.heard(0, 240)
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.wait(240, [0])
    assert outcome.error is None, outcome.describe()
    assert "PeerLostError" in outcome.result or "HorovodInternalError" in outcome.result
    assert "rank 1" in outcome.result


OLD_JAX = """
import importlib.metadata, sys
version = importlib.metadata.version
importlib.metadata.version = lambda name: {wanted!r} if name == "jax" else version(name)
import horovod.jax
"""


@pytest.mark.parametrize(
    ("wanted", "code", "message"),
    [
        ("0.4.30", 1, "HorovodVersionMismatchError: .*0.9 or newer, below 0.12.*0.4.30"),
        ("99.0", 0, "was tested with JAX from 0.9 to below 0.12, not with 99.0"),
    ],
)
def test_wrong_version_of_jax(wanted: str, code: int, message: str):
    import re

    done = subprocess.run(
        [sys.executable, "-c", OLD_JAX.format(wanted=wanted)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_without_jax(tmp_path: Any):
    program = (
        "import importlib.metadata as m\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
        "import horovod.jax\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert "pip install 'horovod[jax]'" in done.stderr
