"""The collectives on tensors of a GPU: two ranks that share one, and one rank alone.

Skipped where TensorFlow and torch do not both have a GPU. Nothing here multiplies matrices, so it
also runs where TensorFlow lacks the libraries for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.tensorflow as hvd
from horovod.tensorflow.ops import bridge
from tests.effort import examples
from tests.ranks import RankPool, run_ranks
from tests.tensorflow.conftest import tensorflow_pool
from tests.torch.reference import Case, cases

GPUS = tf.config.list_physical_devices("GPU") if torch.cuda.is_available() else []
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a GPU for TensorFlow and torch")

DEVICE = "/GPU:0"
GROWING = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # or the first to come takes all memory

MODES = ["eager", "function"]


@pytest.fixture(scope="module", params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    for pool in tensorflow_pool(request.param, GROWING):
        pool.run(lambda: float(put([1.0])[0] + 1), timeout=300)  # the device starts
        yield pool


def put(values: Any, device: str = DEVICE) -> tf.Tensor:
    """An eager tensor on a device; TensorFlow keeps int32 in host memory all the same."""
    with tf.device(device):
        return tf.identity(tf.constant(values))


def run_on(
    device: str, mode: str, step: Callable[..., Sequence[Any]], values: Sequence[Any]
) -> list[tf.Tensor]:
    """The tensors that `step` returns for `values` on a device."""
    with tf.device(device):
        run = tf.function(step) if mode == "function" else step
        return list(run(*[put(value, device) for value in values]))


def kind_of(tensor: tf.Tensor) -> str:
    """The kind of device whose memory a tensor is in."""
    return tf.DeviceSpec.from_string(tensor.backing_device).device_type


OURS = tf.DeviceSpec.from_string(DEVICE).device_type


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return bridge.to_tensorflow(tensor.clone()).numpy()


# -- every collective ------------------------------------------------------------------------


def reduce_all(mode: str, group: list[Case]) -> tuple[list[np.ndarray], list[str]]:
    """Every case on its own and in a group of two, and what memory the results are in."""

    def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for index, (tensor, case) in enumerate(zip(tensors, group, strict=True)):
            terms = {
                "op": case.op,
                "prescale_factor": case.prescale,
                "postscale_factor": case.postscale,
            }
            results.append(hvd.allreduce(tensor, name=f"alone{index}", **terms))
            results += hvd.grouped_allreduce([tensor, tensor], name=f"group{index}", **terms)
        return results

    results = run_on(DEVICE, mode, step, [as_array(case.tensor(hvd.rank())) for case in group])
    return [result.numpy() for result in results], [kind_of(result) for result in results]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=examples(12), deadline=None)
@given(group=st.lists(cases(), min_size=1, max_size=6))
def test_allreduce(pool: RankPool, mode: str, group: list[Case]):
    outcomes = pool.run(reduce_all, mode, group)
    for index, case in enumerate(group):
        expected = case.expected(pool.size)
        for place in range(3 * index, 3 * index + 3):
            for arrays, kinds in outcomes:
                torch.testing.assert_close(
                    bridge.to_torch(tf.constant(arrays[place])).cpu(),
                    expected,
                    # A device rounds scale factors to its own arithmetic.
                    rtol=2e-2 if case.dtype.itemsize == 2 else 1e-5,
                    atol=1e-2 if case.dtype.itemsize == 2 else 1e-5,
                )
                assert kinds[place] == OURS or case.dtype is torch.int32


MOVED = [
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
]


def move(whole: tf.Tensor, some: tf.Tensor, for_all: tf.Tensor) -> list[tf.Tensor]:
    sent, counts = hvd.alltoall(for_all, splits=[1] * hvd.size())
    return [
        hvd.allgather(some),
        *hvd.grouped_allgather([some, whole]),
        hvd.broadcast(whole, hvd.size() - 1),
        sent,
        counts,
    ]


def move_all(mode: str) -> list[str]:
    """The types of which something differs from the same on the CPU; and where results are."""
    wrong = []
    for dtype in MOVED:
        random = np.random.default_rng(hvd.rank())
        whole = tf.cast(random.integers(0, 2 if dtype == "bool" else 100, (4, 3)), dtype).numpy()
        values = [whole, whole[: 2 * hvd.rank()], whole[: hvd.size()]]  # rank 0 has no rows
        ours = run_on(DEVICE, mode, move, values)
        reference = run_on("/CPU:0", mode, move, values)
        for index, (mine, other) in enumerate(zip(ours, reference, strict=True)):
            if mine.numpy().tobytes() != other.numpy().tobytes() or mine.shape != other.shape:
                wrong.append(f"{dtype}, result {index}: {mine}, not {other}")
            # In a function what has integers of 32 bits goes to the CPU, and alltoall has.
            if kind_of(mine) != OURS and dtype != "int32" and index < (4 if mode != "eager" else 5):
                wrong.append(f"{dtype}, result {index}, is on {mine.backing_device}")
    return wrong


@pytest.mark.parametrize("mode", MODES)
def test_moving_rows(pool: RankPool, mode: str):
    assert pool.run(move_all, mode) == [[]] * pool.size


def scatter(tensor: tf.Tensor) -> list[tf.Tensor]:
    halves = hvd.grouped_reducescatter([tensor, tensor / 2], op=hvd.Average)
    return [hvd.reducescatter(tensor, op=hvd.Sum), *halves]


def scatter_all(mode: str) -> list[tuple[np.ndarray, np.ndarray, str]]:
    values = np.arange(15, dtype="float32").reshape(5, 3) * (hvd.rank() + 1)
    ours, reference = (run_on(device, mode, scatter, [values]) for device in (DEVICE, "/CPU:0"))
    pairs = zip(ours, reference, strict=True)
    return [(mine.numpy(), other.numpy(), kind_of(mine)) for mine, other in pairs]


@pytest.mark.parametrize("mode", MODES)
def test_reducescatter(pool: RankPool, mode: str):
    for results in pool.run(scatter_all, mode):
        for mine, other, kind in results:
            np.testing.assert_allclose(mine, other, rtol=1e-6)
            assert kind == OURS


def join_early(mode: str) -> float:
    result = 0.0
    for step in range(2 if hvd.rank() == 0 else 3):
        (minimum,) = run_on(
            DEVICE, mode, lambda x: [hvd.allreduce(x, op=hvd.Min, name="joined")], [[2.0 + step]]
        )
        result = float(minimum[0])
    run_on(DEVICE, mode, lambda: [hvd.join()], [])
    return result


@pytest.mark.parametrize("mode", MODES)
def test_join(pool: RankPool, mode: str):
    last = 3.0 if pool.size == 1 else 4.0
    assert pool.run(join_early, mode) == [3.0, last][: pool.size]


def different_shapes(mode: str) -> str:
    try:
        run_on(DEVICE, mode, lambda x: [hvd.allreduce(x, name="bad")], [[1.0] * (2 + hvd.rank())])
    except tf.errors.FailedPreconditionError as error:
        return str(error)
    return ""


def different_places() -> str:
    try:
        hvd.allreduce(put([1.0, 2.0], DEVICE if hvd.rank() == 0 else "/CPU:0"), name="places")
    except tf.errors.FailedPreconditionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", MODES)
def test_messages(pool: RankPool, mode: str):
    if pool.size == 1:
        pytest.skip("one rank agrees with itself")
    assert all("shape" in message for message in pool.run(different_shapes, mode))
    assert all("device" in message for message in pool.run(different_places))


# -- memory ----------------------------------------------------------------------------------


def share() -> dict[str, Any]:
    tensor = put(np.arange(1 << 20, dtype="float32"))
    view, again = bridge.to_torch(tensor), bridge.to_torch(tensor)
    hvd.allreduce(tensor, name="warm")
    before = torch.cuda.memory_allocated()
    result = hvd.allreduce(tensor, op=hvd.Sum, name="kept")
    held = torch.cuda.memory_allocated() - before
    lent = torch.arange(1 << 20, device=view.device)
    torch.cuda.synchronize()
    return {
        "is a view": view.is_cuda and view.data_ptr() == again.data_ptr(),
        "torch's memory that TensorFlow keeps": held,
        "lent": bridge.to_torch(bridge.to_tensorflow(lent)).data_ptr() == lent.data_ptr(),
        "sum": float(tf.reduce_max(tf.abs(result - tensor * hvd.size()))),
    }


def test_memory(pool: RankPool):
    """Inputs are not copied. Results are: TensorFlow frees them with kernels still to read them."""
    for seen in pool.run(share):
        assert seen == {
            "is a view": True,
            "torch's memory that TensorFlow keeps": 0,
            "lent": True,
            "sum": 0.0,
        }


def odd_views() -> list[list[float]]:
    base = torch.arange(24.0, device="cuda")
    views = [base[1:9], base[3:].view(3, 7)[:2], base.view(4, 6).t(), base[::2], base[:0]]

    def function(sources: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
        return views

    sources = [put(np.zeros(view.shape, "float32")) for view in views]
    specs = [tf.TensorSpec(view.shape, tf.float32) for view in views]
    results = bridge.run(function, sources, specs)
    return [
        [float(tf.reduce_sum(each * 2)) for each in results],
        [2 * float(v.sum()) for v in views],
    ]


def test_memory_that_tensorflow_could_not_compute_on(pool: RankPool):
    for sums, expected in pool.run(odd_views):
        assert sums == expected


# -- order of work ---------------------------------------------------------------------------

LENGTH, BUSY, CHAIN, TIMES = 1 << 20, 1 << 25, 60, 50


def busy(one: tf.Tensor) -> tf.Tensor:
    """CHAIN, as a number that the device needs some milliseconds for."""
    waste = tf.zeros([BUSY])
    for _ in range(CHAIN):
        waste = waste * one + one  # of which TensorFlow cannot know that it is 1
    return tf.reduce_min(waste)


def late(value: tf.Tensor, one: tf.Tensor) -> tf.Tensor:
    """Many times the value plus CHAIN, which are not there yet."""
    return tf.fill([LENGTH], value) + busy(one)


def ends(tensor: tf.Tensor, one: tf.Tensor) -> list[tf.Tensor]:
    """The least and the greatest element plus CHAIN, which the device gets to read late."""
    tensor += busy(one)
    return [tf.reduce_min(tensor), tf.reduce_max(tensor)]


def in_order(mode: str) -> list[Any]:
    """What came out wrong, of late inputs and of results that are used at once."""
    rank, size = hvd.rank(), hvd.size()

    def step(value: tf.Tensor, one: tf.Tensor) -> list[tf.Tensor]:
        # Each result is freed with the device still to read it, and the next comes meanwhile.
        seen = ends(hvd.allreduce(late(value, one), op=hvd.Sum, name="first"), one)
        seen += ends(hvd.allreduce(late(value + 1, one), op=hvd.Sum, name="second"), one)
        seen += ends(hvd.broadcast(late(value + 2, one), 0, name="third"), one)
        return seen + ends(hvd.allgather(late(value + 3, one), name="fourth"), one)

    run = tf.function(step) if mode == "function" else step
    wrong = []
    for number in range(TIMES):
        with tf.device(DEVICE):
            seen = [float(end) for end in run(put(float(number * size + rank)), put(1.0))]
        sent = [float(number * size + each + CHAIN) for each in range(size)]
        expected = [sum(sent), sum(sent), sum(sent) + size, sum(sent) + size]
        expected += [sent[0] + 2, sent[0] + 2, sent[0] + 3, sent[-1] + 3]
        if seen != [each + CHAIN for each in expected]:
            wrong.append((number, seen, expected))
    return wrong


@pytest.mark.parametrize("mode", MODES)
def test_work_of_both_is_in_order(pool: RankPool, mode: str):
    assert pool.run(in_order, mode, timeout=240) == [[]] * pool.size


# -- variables and gradients -----------------------------------------------------------------


def broadcast_all(mode: str) -> list[tuple[str, np.ndarray]]:
    rank = hvd.rank()
    with tf.device(DEVICE):
        variables = [
            tf.Variable(tf.cast(tf.fill(shape, rank + 1), dtype))
            for shape in ([], [3], [0, 2], [257, 3])
            for dtype in ("float32", "int64", "bool", "bfloat16")
        ]
        variables += [tf.Variable([rank, rank + 1])]
    with tf.device("/CPU:0"):
        variables.insert(2, tf.Variable([rank + 0.5]))
    places = [variable.device for variable in variables]

    def step() -> None:
        hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)

    (tf.function(step) if mode == "function" else step)()
    assert [variable.device for variable in variables] == places
    return [(variable.dtype.name, variable.numpy()) for variable in variables]


@pytest.mark.parametrize("mode", MODES)
def test_broadcast_variables(pool: RankPool, mode: str):
    everyone = pool.run(broadcast_all, mode)
    for values in everyone:
        for (dtype, value), (_, root) in zip(values, everyone[-1], strict=True):
            np.testing.assert_array_equal(value, root)
            if value.shape == (3,):
                assert value.tolist() == np.full(3, pool.size).astype(value.dtype).tolist(), dtype


def train(mode: str, compression: str, groups: int | None) -> list[np.ndarray]:
    """Variables after steps with gradients of a GPU and of the CPU, dense and sparse."""
    with tf.device(DEVICE):
        weights = [tf.Variable(tf.ones([5, 3]) * number) for number in range(1, 5)]
    with tf.device("/CPU:0"):
        weights.append(tf.Variable(tf.ones([3])))
    table = weights[0]

    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            looked_up = tf.gather(table, rows)  # whose gradients are slices, with rows of 32 bits
            loss = tf.reduce_sum(looked_up * looked_up) * (hvd.rank() + 1.0)
            for weight in weights[1:4]:
                loss += tf.reduce_sum(tf.square(weight)) * (hvd.rank() + 1.0)
            with tf.device("/CPU:0"):
                loss += tf.reduce_sum(weights[4] * (hvd.rank() + 1.0))
        distributed = hvd.DistributedGradientTape(
            tape, compression=getattr(hvd.Compression, compression), groups=groups
        )
        for weight, gradient in zip(weights, distributed.gradient(loss, weights), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.convert_to_tensor(gradient)
            weight.assign_sub(gradient / 16)

    run = tf.function(step) if mode == "function" else step
    for rows in ([0, 1], [1, 4], [2, 2]):
        run(tf.constant(rows, tf.int32))
    return [weight.numpy() for weight in weights]


def trained(size: int) -> list[np.ndarray]:
    """The same in numpy."""
    weights = [np.full((5, 3), number, "float32") for number in range(1, 5)] + [np.ones(3, "f")]
    average = (size + 1) / 2
    for rows in ([0, 1], [1, 4], [2, 2]):
        slices = np.zeros((5, 3), "float32")
        for row in rows:
            slices[row] += 2 * weights[0][row] * average
        gradients = [slices, *(2 * weight * average for weight in weights[1:4])]
        gradients.append(np.full(3, average, "float32"))
        weights = [w - g / 16 for w, g in zip(weights, gradients, strict=True)]
    return weights


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("compression", "groups"), [("none", None), ("fp16", 2)])
def test_gradient_tape(pool: RankPool, mode: str, compression: str, groups: int | None):
    for weights in pool.run(train, mode, compression, groups):
        for mine, expected in zip(weights, trained(pool.size), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5 if compression == "none" else 2e-3)


# -- GPUs that TensorFlow and torch number differently ---------------------------------------


def on_parts(rank: int, size: int) -> list[Any]:
    """A group on both halves of a GPU that TensorFlow takes for two."""
    gpu = tf.config.list_physical_devices("GPU")[0]
    half = tf.config.LogicalDeviceConfiguration(memory_limit=512)
    tf.config.set_logical_device_configuration(gpu, [half, half])
    hvd.init()
    values = [put([1.0, rank], "/GPU:0"), put([2.0, rank], "/GPU:1")]
    results = hvd.grouped_allreduce(values, op=hvd.Sum)
    results += tf.function(lambda x: [hvd.allreduce(x, op=hvd.Sum)])(values[1])
    return [bridge._gpu_numbers(), *(result.numpy().tolist() for result in results)]


def test_a_gpu_that_is_split():
    seen = run_ranks(on_parts, 2, env={"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, timeout=120)
    assert seen == [[[0, 0], [2.0, 1.0], [4.0, 1.0], [4.0, 1.0]]] * 2


def with_own_gpu(rank: int, size: int) -> list[Any]:
    """As scripts do it: every rank shows TensorFlow the GPU of its local rank only."""
    gpus = tf.config.list_physical_devices("GPU")
    hvd.init()
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    sums = [
        run_on(DEVICE, mode, lambda x: [hvd.allreduce(x, op=hvd.Sum)], [[1.0, rank]])[0]
        for mode in MODES
    ]
    return [bridge.to_torch(put([1.0])).device.index, *(each.numpy().tolist() for each in sums)]


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
def test_a_gpu_for_every_rank():
    seen = run_ranks(with_own_gpu, 2, env=GROWING, timeout=120)
    assert seen == [[rank, [2.0, 1.0], [2.0, 1.0]] for rank in range(2)]
