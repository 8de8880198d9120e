"""Runs files one after the other, each as a program of its own that finds no Spark session.

python -m tests.spark.paste FILE ...
"""

from __future__ import annotations

import runpy
import sys

from pyspark.sql import SparkSession


def main(files: list[str]) -> None:
    for file in files:
        runpy.run_path(file, run_name="__main__")
        session = SparkSession.getActiveSession()
        assert session is not None, f"{file} has made no session"
        session.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
