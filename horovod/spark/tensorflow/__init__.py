"""TensorFlow on Spark: `compute_worker` runs the TF data service on executors."""

from __future__ import annotations
