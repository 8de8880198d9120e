"""Turn Parquet into the batches of a rank, in bounded memory."""
