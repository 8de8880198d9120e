"""``/metrics`` follows the rules of Prometheus' text format, and what Grafana asks for is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from horovod.observe.dashboard import prometheus
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.reports import parse_report
from tests.observe.dashboard.simulated import START, SimulatedJob

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "examples" / "monitoring"

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
HOSTILE = 'a"} 1\nhorovod_ranks 9\\'


def parse(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Every sample by name and labels, after the rules of the text format."""
    assert text.endswith("\n")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    types: dict[str, str] = {}
    current = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in found, f"{current} is in two groups"
            assert len(line.split(" ", 3)[3]) > 4
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert name.endswith("_total") == (kind == "counter"), name
            types[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == current
            assert match[1] in types
            labels = tuple(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            samples = found.setdefault(match[1], {})
            assert labels not in samples, f"{line} is there twice"
            samples[labels] = float(match[3])
    return found


def board(host: str = "") -> Board:
    job = SimulatedJob(4, per_host=2)
    job.slow = {1: 0.05}
    found = Board("train.py", START, 1.0)
    places = job.places()
    if host:
        places["3"][0] = host
    found.take_decision(0, places, START)
    for _ in range(4):  # a rank is slow only if that lasts
        job.run(12)
        job.now += 1.0
        for rank in range(4):
            content = job.report(rank)
            content["stats"] |= {"gpu_use": 0.5, "gpu_memory_total_bytes": 2**34}
            if rank == 0:
                content["metrics"] = {'loss"\\': [[1, 0.25]]}
            report = parse_report(0, rank, json.dumps(content).encode())
            found.take_report(report, job.now)
        found.update(job.now)
    found.events.lost("3", "node01", "killed", job.now)
    found.update(job.now)
    return found


def test_every_line_follows_the_rules():
    found = parse(prometheus.render(board(), START + 10))
    assert found["horovod_ranks"][()] == 4
    assert found["horovod_steps_total"][("rank", "2"), ("host", "node01")] == 48
    assert found["horovod_rank_up"][("rank", "1"), ("host", "node00")] == 1
    straggler = (("rank", "1"), ("host", "node00"), ("reason", "backward"))
    assert found["horovod_rank_straggler"] == {straggler: 1}
    assert found["horovod_events_total"][(("kind", "lost"),)] == 1
    moved = (("rank", "0"), ("host", "node00"), ("transport", "network"))
    assert found["horovod_bytes_moved_total"][moved] == 48_000_000
    assert found["horovod_metric"] == {(("name", 'loss\\"\\\\'),): 0.25}
    assert found["horovod_job_ended"][()] == 0


def test_hostile_labels_are_escaped():
    found = parse(prometheus.render(board(HOSTILE), START + 10))
    assert found["horovod_ranks"] == {(): 4}
    assert any('a\\"} 1' in dict(labels)["host"] for labels in found["horovod_steps_total"])


def test_before_any_report():
    empty = Board("", START, 1.0)
    empty.update(START)
    found = parse(prometheus.render(empty, START))
    assert found["horovod_ranks"] == {(): 0}
    assert "horovod_steps_total" not in found


def test_the_library_of_prometheus_reads_it_too():
    parser = pytest.importorskip("prometheus_client.parser")
    text = prometheus.render(board(HOSTILE), START + 10)
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    assert len(families["horovod_steps"].samples) == 4


def test_grafana_asks_for_metrics_that_exist():
    content = (MONITORING / "grafana.json").read_text()
    asked = set(re.findall(r"\bhorovod_[a-z_]+", content))
    names = set(parse(prometheus.render(board(), START + 10)))
    assert len(asked) > 15
    assert asked <= names, asked - names
    dashboard = json.loads(content)
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_the_page_of_the_documentation_lists_every_metric():
    documented = set(re.findall(r"`(horovod_[a-z_]+)", (ROOT / "docs/dashboard.md").read_text()))
    names = set(parse(prometheus.render(board(), START + 10)))
    assert documented == names


def test_the_example_of_a_scrape_configuration():
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["authorization"]["type"] == "Bearer"
    assert "credentials_file" in scrape["authorization"]
