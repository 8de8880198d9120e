"""KerasEstimator on the backend of KERAS_BACKEND, on one process; tests run it as a program.

python -m tests.spark.keras_program FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import keras

from horovod.spark.common.backend import Backend
from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator


class Here(Backend):
    """Trains in this process."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        assert env
        assert env["KERAS_BACKEND"] == keras.config.backend()
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self) -> int:
        return 1


def main() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    estimator = KerasEstimator(
        backend=Here(),
        model=model,
        store=Store.create(sys.argv[1]),
        optimizer=keras.optimizers.Adam(0.05),
        loss="mse",
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=3,
        verbose=0,
        random_seed=1,
        validation=0.1,
        run_id="again",
    )
    for _ in range(2):  # the second time it is resumed
        trained = estimator.fit_on_parquet()
        steps = int(trained.getModel().optimizer.iterations)
        print(json.dumps({"steps": steps, **trained.getHistory()}))


if __name__ == "__main__":
    main()
