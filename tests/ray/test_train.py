"""The trainer for Ray Train, and both ways to train under Ray Tune."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
import ray.train
import ray.tune
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

from horovod.ray import RayExecutor
from horovod.ray.train import HorovodConfig, HorovodTrainer
from tests.ray import training

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(900)]


def loop(config: dict[str, Any]) -> None:
    """Trains up to `steps`; rank 1 is killed once, after step 2."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    context = ray.train.get_context()
    assert (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
    start, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            start = json.loads(Path(folder, "state.json").read_text())["step"]
    shard = ray.train.get_dataset_shard("train")
    rows = sum(len(batch["id"]) for batch in shard.iter_batches(batch_size=4))
    for step in range(start + 1, config["steps"] + 1):
        total = hvd.allreduce(torch.tensor([float(rows)]), op=hvd.Sum).item()
        metrics = {"step": step, "rows": total, "start": start, "mine": os.environ["MINE"]}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "state.json").write_text(json.dumps({"step": step}))
            saved = ray.train.Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
            ray.train.report(metrics, checkpoint=saved)
        if step == 2 and start == 0:
            ray.train.get_all_reported_checkpoints()  # once the controller has them all
            if hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def trainer(folder: Path, steps: int) -> HorovodTrainer:
    return HorovodTrainer(
        loop,
        train_loop_config={"steps": steps},
        horovod_config=HorovodConfig(timeout_s=300, env_vars={"MINE": "x"}),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
        datasets={
            "train": ray.data.from_items([{"id": i} for i in range(30)], override_num_blocks=2)
        },
    )


def test_training_goes_on_after_a_failure_and_when_it_is_restored(tmp_path: Path):
    result = trainer(tmp_path, 3).fit()
    assert result.metrics == {"step": 3, "rows": 30.0, "start": 2, "mine": "x"}
    result = trainer(tmp_path, 4).fit()
    assert result.metrics == {"step": 4, "rows": 30.0, "start": 3, "mine": "x"}
    with result.checkpoint.as_directory() as folder:
        assert json.loads(Path(folder, "state.json").read_text()) == {"step": 4}


def test_an_error_of_the_loop_is_reported(tmp_path: Path):
    def fail() -> None:
        if ray.train.get_context().get_world_rank() == 1:
            raise LookupError("nothing there")

    failing = HorovodTrainer(
        fail,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(ray.train.TrainingFailedError, match="nothing there"):
        failing.fit()


def test_what_is_no_configuration():
    with pytest.raises(ValueError, match="must be a HorovodConfig"):
        HorovodTrainer(loop, horovod_config={"timeout_s": 3})  # type: ignore[arg-type]
    config = HorovodConfig(key=b"k" * 32)
    assert "kkk" not in repr(config)
    assert "key" not in config.to_dict()


def tune(trial: Any, folder: Path, bundles: list[dict[str, float]]) -> list[dict[str, Any]]:
    results = ray.tune.Tuner(
        ray.tune.with_resources(trial, ray.tune.PlacementGroupFactory(bundles)),
        param_space={"value": ray.tune.grid_search([1.0, 2.0])},
        run_config=ray.tune.RunConfig(storage_path=str(folder), name="tuning", verbose=0),
    ).fit()
    assert not results.errors
    return sorted((r.metrics for r in results), key=lambda metrics: metrics["config"]["value"])


def test_an_executor_in_the_placement_group_of_a_trial(tmp_path: Path):
    def trial(config: dict[str, float]) -> None:
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=2)
        executor.start()
        found = executor.run(training.place)
        executor.shutdown()
        ray.tune.report({"ranks": [one["rank"] for one in found], "twice": 2 * config["value"]})

    found = tune(trial, tmp_path, [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}])
    assert [one["twice"] for one in found] == [2.0, 4.0]
    assert [one["ranks"] for one in found] == [[0, 1], [0, 1]]


def test_a_trainer_in_a_trial(tmp_path: Path):
    def place(config: dict[str, float]) -> None:
        mine = training.place()
        ray.train.report({"size": mine["size"], "value": config["value"]})

    def trial(config: dict[str, float]) -> None:
        HorovodTrainer(
            place,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=str(tmp_path / "runs"),
                name=f"value{config['value']:g}",
                callbacks=[TuneReportCallback()],
            ),
        ).fit()

    found = tune(trial, tmp_path, [{"CPU": 1}])
    assert [(one["size"], one["value"]) for one in found] == [(2, 1.0), (2, 2.0)]
