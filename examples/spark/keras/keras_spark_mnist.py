"""Handwritten digits from a Spark DataFrame with `KerasEstimator`.

Run it with ``python keras_spark_mnist.py``, or with ``spark-submit`` on a cluster. KERAS_BACKEND
chooses what Keras computes with. The digits are scikit-learn's, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import keras
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.types import DoubleType
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--master", help="where Spark runs; what spark-submit says, or local[2]")
parser.add_argument("--num-proc", type=int, default=2, help="processes that train")
parser.add_argument("--batch-size", type=int, default=32, help="of each process")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--work-dir", help="where data and checkpoints go; all hosts must see it")
parser.add_argument("--target-accuracy", type=float, help="fail below this")


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    options = parser.parse_args()
    builder = SparkSession.builder.appName("keras_spark_mnist")
    if options.master:
        builder = builder.master(options.master)
    spark = builder.getOrCreate()

    images, labels = load_digits(return_X_y=True)
    rows = [(Vectors.dense(image / 16.0), int(k)) for image, k in zip(images, labels, strict=True)]
    digits = spark.createDataFrame(rows, ["features", "label"])
    train_df, test_df = digits.randomSplit([0.8, 0.2], seed=1)

    keras.utils.set_random_seed(1)
    estimator = KerasEstimator(
        num_proc=options.num_proc,
        store=Store.create(options.work_dir or tempfile.mkdtemp()),
        model=make_model(),
        optimizer=keras.optimizers.Adam(1e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation=0.1,
        random_seed=1,
        verbose=1,
    )
    digits_model = estimator.fit(train_df).setOutputCols(["scores"])

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
