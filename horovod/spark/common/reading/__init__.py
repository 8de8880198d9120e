"""From Parquet to the batches of a rank, in bounded memory."""
