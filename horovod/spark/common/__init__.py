"""The parts that the estimators of all frameworks share.

`estimator` takes what `params` lets users set. It writes the DataFrame as Parquet (`util`, with
`metadata` and `cache`) and lets a `backend` train. Each rank reads through a `datamodule` and what
is in `reading/`. `store` and `stores/` keep data, checkpoints and logs; `serialization` saves
estimators and models; `prediction` is what models do to a DataFrame.
"""
