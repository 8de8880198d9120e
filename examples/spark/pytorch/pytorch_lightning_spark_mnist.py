"""Handwritten digits from a Spark DataFrame with Lightning's `TorchEstimator`.

Run it with ``python pytorch_lightning_spark_mnist.py``, or with ``spark-submit`` on a cluster. The
digits are scikit-learn's, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.types import DoubleType
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--master", help="where Spark runs; what spark-submit says, or local[2]")
parser.add_argument("--num-proc", type=int, default=2, help="processes that train")
parser.add_argument("--batch-size", type=int, default=32, help="of each process")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--work-dir", help="where data and checkpoints go; all hosts must see it")
parser.add_argument("--target-accuracy", type=float, help="fail below this")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.fc = torch.nn.Linear(32 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(F.relu(self.conv1(images.float().reshape(-1, 1, 8, 8))), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        return self.fc(hidden.flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch["features"]), batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch["features"])
        self.log("val_loss", F.cross_entropy(scores, batch["label"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    options = parser.parse_args()
    builder = SparkSession.builder.appName("pytorch_lightning_spark_mnist")
    if options.master:
        builder = builder.master(options.master)
    spark = builder.getOrCreate()

    images, labels = load_digits(return_X_y=True)
    rows = [(Vectors.dense(image / 16.0), int(k)) for image, k in zip(images, labels, strict=True)]
    digits = spark.createDataFrame(rows, ["features", "label"])
    train_df, test_df = digits.randomSplit([0.8, 0.2], seed=1)

    torch.manual_seed(1)
    estimator = TorchEstimator(
        num_proc=options.num_proc,
        store=Store.create(options.work_dir or tempfile.mkdtemp()),
        model=Net(),
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation=0.1,
        random_seed=1,
        verbose=0,
    )
    digits_model = estimator.fit(train_df).setOutputCols(["scores"])
    for epoch in digits_model.getHistory():
        print(epoch)

    argmax = udf(lambda scores: float(scores.argmax()), DoubleType())
    predicted = digits_model.transform(test_df).withColumn("prediction", argmax("scores"))
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    accuracy = evaluator.evaluate(predicted.withColumn("label", predicted.label.cast("double")))
    print(f"test accuracy: {accuracy:.3f}")
    spark.stop()
    if options.target_accuracy and accuracy < options.target_accuracy:
        raise SystemExit(f"{accuracy:.3f} is below {options.target_accuracy}")


if __name__ == "__main__":
    main()
