"""Stores of an estimator's files, on everything that `fsspec` can open, and on HDFS."""
