"""What the estimators share.

estimator -> params (what can be set), prepare (the DataFrame becomes Parquet, through cache and
metadata), backend (what runs the training) -> datamodule -> reader, columns, row_buffer, batches
(what each rank reads). store keeps data, checkpoints and logs, serialization saves estimators and
models, prediction is what models do to a DataFrame.
"""
