"""The parts that the estimators of all frameworks share.

`estimator` takes the parameters of `params`. It writes the DataFrame as Parquet (`util`, with
`metadata` and `cache`) and lets a `backend` train. Each rank reads with a `datamodule`, which uses
`reading/`. `store` and `stores/` keep data, checkpoints and logs; `serialization` saves estimators
and models; `prediction` adds a model's predictions to a DataFrame.
"""
