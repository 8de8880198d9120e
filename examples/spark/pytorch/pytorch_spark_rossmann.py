"""Sales of shops from a table with categorical columns: embeddings, trained from a DataFrame.

The shape is that of the Rossmann competition: shops, days, promotions, holidays, distances to
competitors and the weather predict sales, and what counts is the relative error (RMSPE). The data
is made up, so nothing is downloaded. Text becomes category indices in a Spark ML pipeline whose
last stage is the estimator; the whole pipeline is saved and loaded again to predict.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from typing import Any

import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import StringIndexer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--master", help="where Spark runs; what spark-submit says, or local[2]")
parser.add_argument("--num-proc", type=int, default=2, help="processes that train")
parser.add_argument("--batch-size", type=int, default=64, help="of each process")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--days", type=int, default=120, help="of each of the 40 shops")
parser.add_argument("--work-dir", help="where data and checkpoints go; all hosts must see it")
parser.add_argument("--target-rmspe", type=float, help="fail above this")

SHOPS = 40
KINDS = ["corner", "mall", "station", "outlet"]
HOLIDAYS = ["none", "none", "none", "none", "none", "school", "public"]
TEXT = ["kind", "holiday"]  # become indices in the pipeline
CATEGORIES = {"shop": SHOPS, "weekday": 7, "promo": 2, "kind_index": 5, "holiday_index": 4}
NUMBERS = ["distance", "temperature"]


def make_rows(days: int) -> list[tuple[Any, ...]]:
    """Sales with the effects that the model has to find, and noise."""
    source = random.Random(7)
    size = [source.uniform(0.5, 1.5) for _ in range(SHOPS)]
    weekday_effect = [0.1, 0.0, -0.1, 0.0, 0.2, 0.4, -0.6]
    rows = []
    for shop in range(SHOPS):
        kind, distance = source.choice(KINDS), source.uniform(0.0, 1.0)
        for day in range(days):
            promo, holiday = int(source.random() < 0.3), source.choice(HOLIDAYS)
            temperature = source.gauss(0, 1)
            log_sales = (
                7.0
                + size[shop]
                + weekday_effect[day % 7]
                + 0.3 * promo
                + 0.2 * KINDS.index(kind)
                - (0.5 if holiday == "public" else 0.0)
                + 0.2 * distance
                + 0.05 * temperature
                + source.gauss(0, 0.05)
            )
            values = (shop, day % 7, promo, kind, holiday, distance, temperature)
            rows.append((*values, day, log_sales))
    return rows


class Sales(torch.nn.Module):
    """An embedding for each categorical column; the numbers go beside them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = list(CATEGORIES.values())
        widths = [min(16, size // 2 + 1) for size in sizes]
        self.embeddings = torch.nn.ModuleList(
            [torch.nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=True)]
        )
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(sum(widths) + len(NUMBERS), 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 32),
            torch.nn.ReLU(),
            torch.nn.Linear(32, 1),
        )
        torch.nn.init.constant_(self.layers[-1].bias, 8.0)  # near the mean of the label

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        categories = columns[: len(self.embeddings)]
        hidden = [
            embedding(column) for embedding, column in zip(self.embeddings, categories, strict=True)
        ]
        numbers = [column.reshape(-1, 1) for column in columns[len(self.embeddings) :]]
        return self.layers(torch.cat([*hidden, *numbers], 1))


def rmspe(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The relative error of sales, whose logarithm is what the model predicts."""
    return ((output.exp() - label.exp()) / label.exp()).square().mean().sqrt()


def main() -> None:
    options = parser.parse_args()
    builder = SparkSession.builder.appName("pytorch_spark_rossmann")
    if options.master:
        builder = builder.master(options.master)
    spark = builder.getOrCreate()
    columns = ["shop", "weekday", "promo", *TEXT, *NUMBERS, "day", "log_sales"]
    table = spark.createDataFrame(make_rows(options.days), columns)
    last_days = F.col("day") >= int(options.days * 0.85)
    train_df, test_df = table.filter(~last_days), table.filter(last_days)

    torch.manual_seed(1)
    model = Sales()
    work_dir = options.work_dir or tempfile.mkdtemp()
    estimator = TorchEstimator(
        num_proc=options.num_proc,
        store=Store.create(work_dir),
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=torch.nn.SmoothL1Loss(),
        metrics=[rmspe],
        feature_cols=[*CATEGORIES, *NUMBERS],
        categorical_cols=list(CATEGORIES),
        continuous_cols=NUMBERS,
        label_cols=["log_sales"],
        validation=0.1,
        batch_size=options.batch_size,
        epochs=options.epochs,
        random_seed=1,
    )
    indexer = StringIndexer(
        inputCols=TEXT, outputCols=[f"{name}_index" for name in TEXT], handleInvalid="keep"
    )
    Pipeline(stages=[indexer, estimator]).fit(train_df).write().overwrite().save(
        f"{work_dir}/sales_pipeline"
    )

    predicted = PipelineModel.load(f"{work_dir}/sales_pipeline").transform(test_df)
    relative = F.exp("log_sales__output") / F.exp("log_sales") - 1
    error = math.sqrt(predicted.select(F.avg(relative * relative)).first()[0])
    print(f"test RMSPE: {error:.3f}")
    spark.stop()
    if options.target_rmspe and error > options.target_rmspe:
        raise SystemExit(f"{error:.3f} is above {options.target_rmspe}")


if __name__ == "__main__":
    main()
