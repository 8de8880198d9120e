"""The elastic example under the real ``horovodrun``, with torch, while workers are killed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.elastic.launched import Launched
from tests.runner.horovodrun import ROOT

EXAMPLE = str(ROOT / "examples" / "elastic" / "pytorch_mnist_elastic.py")


def test_the_example_survives_a_kill_and_learns(tmp_path: Path):
    options = ["-H", "localhost:2", "--min-np", "1", "-np", "2"]
    program = [EXAMPLE, "--epochs", "10", "--batches-per-commit", "5", "--target-accuracy", "0.9"]
    with Launched(tmp_path, options, program=program, forked=True) as job:
        job.await_output("epoch  1")
        job.kill("w0")
        job.await_event("formed", decision=2)
        assert job.wait() == 0, str(job)
        epochs = [int(number) for number in re.findall(r"epoch +(\d+)", job.output)]
        assert sorted(set(epochs)) == list(range(1, 11)), "none is left out"
        assert job.output.count("final test accuracy") == 1
        assert [len(event["workers"]) for event in job.events("decision")][:2] == [2, 1]
        (broken,) = [event for event in job.events("broken") if event["decision"] == 1]
        assert broken["worker"] == "w1"
        assert broken["why"], "what the survivor's collective said"
        job.check_nothing_left()
