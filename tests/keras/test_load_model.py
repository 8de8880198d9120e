"""Saved models: they know nothing of Horovod, and `load_model` goes on with them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras.flavours import flavour, front_end
from tests.keras.training import BATCH, data, fit_together, numpy, share
from tests.ranks import RankPool


def _save_and_load(folder: str, suffix: str) -> dict[str, Any]:
    keras, hvd = front_end()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.01, clipnorm=1.0), backward_passes_per_step=2
    )
    model = fit_together(keras, hvd, optimizer, 4)
    path = Path(folder) / f"model{hvd.rank()}{suffix}"
    model.save(path)
    content = path.read_bytes()
    if suffix == ".keras":
        content += zipfile.ZipFile(path).read("config.json")

    plain = keras.models.load_model(path)
    loaded = hvd.load_model(path)
    names = type(plain.optimizer), type(loaded.optimizer).__name__
    states = [
        [numpy(v) for v in each.optimizer.variables if tuple(v.shape) == (6, 2)]
        for each in (model, plain, loaded)
    ]
    x, y = data(4)
    trained = [loaded] if _is_broken(suffix) else [loaded, plain]
    for each in trained:
        each.fit(share(x, hvd.rank()), share(y, hvd.rank()), batch_size=BATCH, verbose=0)
    return {
        "is broken": _is_broken(suffix),
        "mentions": b"horovod" in content.lower(),
        "is plain": names[0] is keras.optimizers.Adam or flavour() == "torch",
        "is ours": hasattr(names[0], "_hvd"),
        "name": names[1],
        "rate": float(numpy(loaded.optimizer.learning_rate)),
        "states": states,
        "iterations": int(numpy(loaded.optimizer.iterations)),
        "plain weights": plain.get_weights(),
        "weights": loaded.get_weights(),
    }


def _is_broken(suffix: str) -> bool:
    """Whether Keras cannot bring an optimizer back from such a file."""
    return suffix == ".h5" and flavour() != "tf_keras"


def test_save_and_load(keras_pool: RankPool, tmp_path: Path):
    _check(*keras_pool.run(_save_and_load, str(tmp_path), ".keras"))


@pytest.mark.parametrize("name", ["tf_keras", "torch"])
def test_old_files(keras_pools: dict[str, RankPool], tmp_path: Path, name: str):
    _check(*keras_pools[name].run(_save_and_load, str(tmp_path), ".h5"))


def _check(first: dict[str, Any], second: dict[str, Any]) -> None:
    for found in (first, second):
        assert not found["mentions"]
        assert found["is plain"]
        assert not found["is ours"]
        assert found["name"] == "Adam"
        assert found["rate"] == pytest.approx(0.01)
        assert found["iterations"] == (4 if found["is broken"] else 8)
        if found["is broken"]:
            continue
        saved, plain, loaded = found["states"]
        assert len(plain) == 2  # two moments, and no sums of gradients
        for one, two, three in zip(saved[:2], plain, loaded, strict=True):
            assert one.any()
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(one, three)
    for one, other in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(one, other)
    if not first["is broken"]:
        assert not np.array_equal(first["plain weights"][0], second["plain weights"][0])


def _custom(folder: str) -> tuple[str, float, float, bool]:
    keras, hvd = front_end()

    class Strange(keras.optimizers.SGD):
        pass

    class Layer(keras.layers.Dense):
        pass

    model = keras.Sequential([keras.layers.Input((5,)), Layer(2)])
    model.compile(optimizer=hvd.DistributedOptimizer(Strange(0.25)), loss="mse")
    x, y = data(1)
    model.fit(share(x, hvd.rank()), share(y, hvd.rank()), batch_size=BATCH, verbose=0)
    path = Path(folder) / f"custom{hvd.rank()}.keras"
    model.save(path)
    loaded = hvd.load_model(
        path,
        custom_optimizers=[Strange],
        custom_objects={"Layer": Layer},
        compression=hvd.Compression.fp16,
    )
    optimizer = loaded.optimizer
    loaded.fit(share(x, hvd.rank()), share(y, hvd.rank()), batch_size=BATCH, verbose=0)
    weight = float(loaded.get_weights()[0].sum())
    return (
        type(optimizer).__name__,
        float(numpy(optimizer.learning_rate)),
        weight,
        isinstance(optimizer, Strange),
    )


def test_custom_classes(keras_pool: RankPool, tmp_path: Path):
    first, second = keras_pool.run(_custom, str(tmp_path))
    assert first == second
    assert first[0::3] == ("Strange", True)
    assert first[1] == 0.25


def _registered(folder: str) -> tuple[bool, bool]:
    """An optimizer that Keras knows by a registered name."""
    keras, hvd = front_end()

    @keras.utils.register_keras_serializable(package="mine")
    class Known(keras.optimizers.SGD):
        pass

    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(2)])
    model.compile(optimizer=hvd.DistributedOptimizer(Known(0.25)), loss="mse")
    path = Path(folder) / f"registered{hvd.rank()}.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    return type(plain.optimizer) is Known, isinstance(hvd.load_model(path).optimizer, Known)


def test_registered_classes(keras_pool: RankPool, tmp_path: Path):
    assert keras_pool.run(_registered, str(tmp_path)) == [(True, True)] * 2


def _without_optimizer(folder: str) -> bool:
    keras, hvd = front_end()
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(2)])
    path = Path(folder) / f"untrained{hvd.rank()}.keras"
    model.save(path)
    return getattr(hvd.load_model(path), "optimizer", None) is None


def test_a_model_without_optimizer(keras_pools: dict[str, RankPool], tmp_path: Path):
    assert keras_pools["torch"].run(_without_optimizer, str(tmp_path)) == [True, True]
