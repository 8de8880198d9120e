"""`DistributedOptimizer`: what it does with gradients, under each of its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import flavour, front_end
from tests.keras.training import apply, fit_together, numpy, small_model, tensor, variable
from tests.ranks import RankPool


def _step(hvd: Any, keras: Any, gradients: list[Any], **arguments: Any) -> list[np.ndarray]:
    """What a step of SGD with learning rate 1 subtracts from each variable."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)
    variables = [variable(keras, np.zeros_like(g), f"v{i}") for i, g in enumerate(gradients)]
    apply(optimizer, [tensor(keras, g) for g in gradients], variables)
    return [-numpy(each) for each in variables]


def _reductions() -> dict[str, list[np.ndarray]]:
    keras, hvd = front_end()
    me = hvd.rank() + 1.0
    gradients = [np.full(3, me, "f"), np.full((2, 2), 10 * me, "f"), np.full((), 100 * me, "f")]
    alone = _alone(hvd)
    done = {
        "average": _step(hvd, keras, gradients),
        "sum": _step(hvd, keras, gradients, op=hvd.Sum),
        "predivide": _step(hvd, keras, gradients, gradient_predivide_factor=2.0),
        "fp16": _step(hvd, keras, gradients, compression=hvd.Compression.fp16),
        "bf16": _step(hvd, keras, gradients, compression=hvd.Compression.bf16),
        "groups": _step(hvd, keras, gradients, groups=2),
        "alone": _step(hvd, keras, gradients, process_set=alone),
    }
    hvd.remove_process_set(alone)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        done["num_groups"] = _step(hvd, keras, gradients, num_groups=2)
    return done


def _alone(hvd: Any) -> Any:
    """A process set that rank 1 is not in, and in which rank 0 has nobody else."""
    import os

    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.shutdown()
    hvd.init()
    return hvd.add_process_set([0])


def test_reductions(keras_pool: RankPool):
    for rank, done in enumerate(keras_pool.run(_reductions)):
        mine = float(rank + 1)
        expected = {"sum": 3.0, "alone": mine}
        for kind, steps in done.items():
            value = expected.get(kind, 1.5)
            wanted = [np.full(3, value), np.full((2, 2), 10 * value), np.full((), 100 * value)]
            for step, want in zip(steps, wanted, strict=True):
                np.testing.assert_array_equal(step, want, err_msg=kind)


def _groups_of_variables() -> list[list[str]]:
    """The sizes of the tensors in each request, for groups that name variables."""
    keras, hvd = front_end()
    v = [variable(keras, np.zeros(size), f"v{size}") for size in (1, 2, 3, 4)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=[[v[2], v[0]]])
    requests = _requests(lambda: apply(optimizer, [tensor(keras, numpy(x)) for x in v], v))
    return sorted(requests)


def _requests(function: Any) -> list[list[int]]:
    """The sizes of the tensors in each allreduce that `function` asks the engine for."""
    from horovod.engine.runtime import runtime

    seen = []
    submit = runtime.submit

    def note(collective: Any, tensors: Any = (), *arguments: Any, **named: Any) -> Any:
        if collective.kind == "allreduce":
            seen.append([tensor.numel() for tensor in tensors])
        return submit(collective, tensors, *arguments, **named)

    runtime.submit = note  # type: ignore[method-assign]
    try:
        function()
    finally:
        del runtime.submit
    return seen


def test_groups_of_variables(keras_pool: RankPool):
    assert keras_pool.run(_groups_of_variables)[0] == [[2], [3, 1], [4]]


def _requests_of_fit(steps: int) -> list[list[int]]:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    return _requests(lambda: fit_together(keras, hvd, optimizer, steps))


def test_one_exchange_for_all_gradients_of_a_step(keras_pool: RankPool):
    requests = keras_pool.run(_requests_of_fit, 3)[0]
    assert [sorted(sizes) for sizes in requests] == [[2, 6, 12, 30]] * 3


# -- accumulation ------------------------------------------------------------------------------


def _accumulate(average: bool) -> list[Any]:
    """Three windows of two passes; inf in the second."""
    import horovod.torch as hvd_torch

    keras, hvd = front_end()
    # The other SGD of tf-keras multiplies what was infinite by a momentum of zero.
    optimizers = keras.optimizers.legacy if flavour() == "tf_keras" else keras.optimizers
    optimizer = hvd.DistributedOptimizer(
        optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    w = variable(keras, np.zeros(2))
    history = []
    me = hvd.rank() + 1.0
    for number, gradient in enumerate([me, 3 * me, np.inf, 1.0, me, me]):
        if number == 0 and hvd.rank() == 1:
            hvd_torch.barrier()
        apply(optimizer, [tensor(keras, [gradient, me])], [w])
        if number == 0 and hvd.rank() == 0:
            hvd_torch.barrier()  # rank 1 has not begun: nothing is exchanged in the first pass
        history.append((numpy(w).tolist(), int(np.array(numpy(optimizer.iterations)))))
        if not np.isfinite(numpy(w)).all():
            w.assign(np.zeros(2, "float32"))
    return history


@pytest.mark.parametrize("average", [False, True])
def test_passes_are_added_up_before_the_exchange(keras_pool: RankPool, average: bool):
    for history in keras_pool.run(_accumulate, average):
        factor = 0.5 if average else 1.0
        values = [value for value, _ in history]
        assert [count for _, count in history] == [1, 2, 3, 4, 5, 6]
        assert values[0] == [0, 0]
        assert values[1] == [-1.5 * 4 * factor, -1.5 * 2 * factor]
        assert values[2] == values[1]
        assert values[3][0] == -np.inf
        assert values[4] == [0, 0]
        assert values[5] == [-1.5 * 2 * factor] * 2


def _accumulate_in_a_v1_graph() -> list[Any]:
    import tensorflow as tf

    keras, hvd = front_end()
    me = hvd.rank() + 1.0
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.legacy.SGD(1.0), backward_passes_per_step=2
        )
        w = tf.compat.v1.get_variable("w", initializer=tf.zeros(2), use_resource=True)
        gradient = tf.compat.v1.placeholder(tf.float32, [2])
        update = optimizer.apply_gradients([(gradient, w)])
        session.run(tf.compat.v1.global_variables_initializer())
        history = []
        for number in range(4):
            session.run(update, {gradient: [me, number]})
            history.append(session.run([w, optimizer.iterations]))
    return [(value.tolist(), int(count)) for value, count in history]


def test_accumulation_in_a_v1_graph(keras_pools: dict[str, RankPool]):
    for history in keras_pools["tf_keras"].run(_accumulate_in_a_v1_graph):
        assert history == [([0, 0], 1), ([-3, -1], 2), ([-3, -1], 3), ([-6, -6], 4)]


def _accumulate_in_fit() -> tuple[Any, Any, int, int]:
    """Two passes for each step, against steps on twice the batch."""
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )
    model = fit_together(keras, hvd, optimizer, 4)
    from tests.keras.training import data, fit

    x, y = data(4)
    reference = small_model(keras)
    fit(reference, keras.optimizers.SGD(0.1, momentum=0.9), x, y, 16)
    requests = _requests(
        lambda: fit_together(keras, hvd, optimizer.from_config(optimizer.get_config()), 4)
    )
    iterations = int(np.array(numpy(optimizer.iterations)))
    return model.get_weights(), reference.get_weights(), iterations, len(requests)


def test_accumulation_in_fit(keras_pool: RankPool):
    (first, reference, iterations, requests), (second, *_) = keras_pool.run(_accumulate_in_fit)
    assert iterations == 4
    assert requests == 2
    for ours, theirs, wanted in zip(first, second, reference, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=2e-6)


# -- local variables -----------------------------------------------------------------------------


def _local(scale: bool, passes: int) -> tuple[list[float], list[float]]:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), scale_local_gradients=scale, backward_passes_per_step=passes
    )
    mine, shared = variable(keras, np.zeros(2), "mine"), variable(keras, np.zeros(2), "shared")
    optimizer.register_local_var(mine)
    gradient = np.full(2, hvd.rank() + 1.0)
    for _ in range(passes):
        apply(optimizer, [tensor(keras, gradient), tensor(keras, gradient)], [mine, shared])
    return numpy(mine).tolist(), numpy(shared).tolist()


@pytest.mark.parametrize(("scale", "passes"), [(True, 1), (False, 1), (True, 2)])
def test_local_variables(keras_pool: RankPool, scale: bool, passes: int):
    for rank, (mine, shared) in enumerate(keras_pool.run(_local, scale, passes)):
        assert mine == [-(rank + 1.0) * passes / (2 if scale else 1)] * 2
        assert shared == [-1.5 * passes] * 2


def _local_layers() -> tuple[Any, Any]:
    keras, hvd = front_end()
    model = small_model(keras)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.get_layer("out")
    )
    with pytest.raises(ValueError, match="local_layers must be Keras layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[1])
    from tests.keras.training import BATCH, data, fit, share

    x, y = data(2)
    fit(model, optimizer, share(x, hvd.rank()), share(y, hvd.rank()), BATCH)
    return model.get_layer("hidden").get_weights(), model.get_layer("out").get_weights()


def test_local_layers(keras_pool: RankPool):
    (first, first_out), (second, second_out) = keras_pool.run(_local_layers)
    assert not np.array_equal(first_out[0], second_out[0])
    assert first[0].shape == second[0].shape


# -- more than one optimizer, and steps of one's own ---------------------------------------------


def _two_optimizers() -> list[Any]:
    keras, hvd = front_end()
    base = keras.optimizers.Adam(0.1)
    one, two = hvd.DistributedOptimizer(base), hvd.DistributedOptimizer(base)
    a, b = variable(keras, np.zeros(2), "a"), variable(keras, np.zeros(3), "b")
    me = hvd.rank() + 1.0
    for _ in range(3):
        apply(one, [tensor(keras, [me, -me])], [a])
        apply(two, [tensor(keras, [me, 2 * me, 0.0])], [b])
    counts = [int(np.array(numpy(each.iterations))) for each in (base, one, two)]
    return [numpy(a).tolist(), numpy(b).tolist(), counts]


def test_one_optimizer_wrapped_twice_makes_two(keras_pool: RankPool):
    first, second = keras_pool.run(_two_optimizers)
    assert first == second
    assert first[2] == [0, 3, 3]
    np.testing.assert_allclose(first[0], [-0.3, 0.3], rtol=1e-4)


def _custom_step() -> list[Any]:
    """A training loop of one's own, compiled the way the backend does it."""
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    w = variable(keras, np.array([1.0, 2.0]))
    me = hvd.rank() + 1.0
    if flavour() in ("tensorflow", "tf_keras"):
        import tensorflow as tf

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.convert_to_tensor(w) * me)
            variables = [w] if flavour() == "tf_keras" else [w.value]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        step()
        step()
    elif flavour() == "jax":
        import jax

        optimizer.build([w])

        @jax.jit
        def step(values: Any, state: Any) -> Any:
            gradients = jax.grad(lambda v: (v[0] * me).sum())(values)
            return optimizer.stateless_apply(state, gradients, values)

        values, state = [w.value], [v.value for v in optimizer.variables]
        for _ in range(2):
            values, state = step(values, state)
        w.assign(values[0])
    else:
        for _ in range(2):
            w.value.grad = None
            (w.value * me).sum().backward()
            optimizer.apply([w.value.grad], [w])
    return numpy(w).tolist()


def test_a_step_of_ones_own(keras_pool: RankPool):
    assert keras_pool.run(_custom_step) == [[-0.5, 0.5]] * 2


def _many_jax_steps() -> float:
    """Steps that are dispatched faster than they run, on fewer cores than threads."""
    import jax
    import jax.numpy as jnp

    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    variables = [variable(keras, np.full((40, 40), 0.01 * i), f"w{i}") for i in range(8)]
    optimizer.build(variables)
    x = jnp.full((16, 40), hvd.rank() + 1.0)

    @jax.jit
    def step(values: Any, state: Any) -> Any:
        gradients = jax.grad(lambda v: sum(jnp.tanh(x @ w).sum() for w in v))(values)
        return optimizer.stateless_apply(state, gradients, values)

    values, state = [v.value for v in variables], [v.value for v in optimizer.variables]
    for _ in range(300):
        values, state = step(values, state)
    return float(sum(v.sum() for v in values))


def test_many_compiled_steps_in_flight(keras_pools: dict[str, RankPool]):
    first, second = keras_pools["jax"].run(_many_jax_steps)
    assert first == second
