"""Where an estimator keeps its files: on what `fsspec` can open, and on HDFS."""
