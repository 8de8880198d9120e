"""``horovodrun --help``: grouped, complete, and no wider than a terminal."""

from __future__ import annotations

import argparse
import re

import pytest

from horovod.runner.options.arguments import parse_args
from horovod.runner.options.parser import make_parser
from horovod.runner.options.tunables import TUNABLES

# Spellings of upstream's horovodrun, all of which old command lines may contain.
UPSTREAM = """\
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
--network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
--fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce
--no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce
--no-torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples
--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise
--min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
--blacklist-cooldown-range --host-discovery-script --timeline-filename --timeline-mark-cycles
--no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
--stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp
--binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level
--log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp
--log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile --gloo --mpi --jsrun
"""


def actions() -> list[argparse.Action]:
    return [action for action in make_parser()._actions if action.option_strings]


def test_every_spelling_of_upstream_is_known():
    known = {flag for action in actions() for flag in action.option_strings}
    assert set(UPSTREAM.split()) <= known


@pytest.mark.parametrize("action", actions(), ids=lambda action: action.option_strings[-1])
def test_every_option_is_explained(action: argparse.Action):
    assert action.help
    if action.help == argparse.SUPPRESS:
        return
    assert action.help.endswith(".")
    assert action.help[0].isupper()
    takes_argument = action.nargs != 0
    assert bool(action.metavar) == takes_argument


def test_only_repeated_defaults_and_old_spellings_are_hidden():
    hidden = {
        flag
        for action in actions()
        if action.help == argparse.SUPPRESS
        for flag in action.option_strings
    }
    opposites = {row.opposite for row in TUNABLES if row.opposite and row.knob.default is not None}
    deprecated = {flag for row in TUNABLES for flag, _ in row.deprecated}
    assert hidden == opposites | deprecated


@pytest.mark.parametrize("columns", ["20", "80", "90", "100", "300"])
def test_help_fits(columns: str, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = make_parser().format_help().splitlines()
    width = min(100, max(80, int(columns)))
    assert [line for line in lines if len(line) > width] == []


def test_short_help_names_options_that_exist(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(["-h"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert 20 <= len(lines) <= 28
    assert max(map(len, lines)) <= 80
    flags = set(re.findall(r"(?<= )--?[a-zA-Z][a-z-]*", text)) - {"--lr"}
    assert "--dashboard" in flags
    assert flags - set(make_parser()._option_string_actions) == set()
    examples = re.findall(r"^  horovodrun (.*)$", text, re.MULTILINE)
    assert [parse_args(each.replace("./hosts", "ls").split()).num_proc for each in examples]


def test_help_is_grouped_and_teaches():
    text = make_parser().format_help()
    for section in ("job", "hosts", "output", "launcher", "elastic", "tuning", "logging", "checks"):
        assert f"\n{section}" in text
    assert all(row.flag in text for row in TUNABLES)
    assert "--log-with-timestamp" not in text
    assert "\nexamples:" in text
    assert "horovodrun -np 2 python train.py" in text
