"""``python -m horovod.timeline``: what it prints and writes, and how it complains."""

from __future__ import annotations

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.observe.reports.command import main
from tests.observe.timeline.made import MadeJob, even, with_slow_rank
from tests.observe.timeline.trace_rules import check


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-W", "error", "-m", "horovod.timeline", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_merge(tmp_path):
    paths = even(3).write(tmp_path)
    out = tmp_path / "all.json"
    done = command("merge", str(out), *paths)
    assert done.returncode == 0, done.stderr
    assert "2 rank(s)" in done.stdout
    assert "perfetto" in done.stdout
    check(json.loads(out.read_text()))


def test_report(tmp_path, capsys):
    assert main(["report", *with_slow_rank(20).write(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("3 ranks on 1 host, 20 steps\n")
    for line in (
        r"  0 \(a\) +17\.1 ms +58\.7 % +0\.3 % +29\.3 % +11\.7 %",
        r"  1 \(a\) +17\.1 ms +88\.0 % +0\.3 % +0\.0 % +11\.7 %",
        r"  rank 1: 20 of 20 steps, later than the others by 5\.0 ms \(median\), 5\.0 ms at most",
        r"Overlap: 0 % of the reductions hidden behind compute; possible: up to 100 %",
        r"2 tensors: b, a",
        r"  1\. rank 1 is slow \(100 ms, 29 % of the run\)",
    ):
        assert re.search(line, text), f"{line}\n{text}"
    assert all(len(line) <= 110 for line in text.splitlines())


def paused(steps: int) -> MadeJob:
    """Rank 1 pauses for 0.2 s in every 20th step."""
    compute = [[10_000.0, 210_000.0 if step % 20 == 19 else 10_000.0] for step in range(steps)]
    return MadeJob(compute, [500.0] * steps)


def test_long_steps_are_listed_in_text_and_page(tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", "--html", str(out), *paused(300).write(tmp_path)]) == 0
    text = capsys.readouterr().out
    for line in (
        "Long steps: 15 of 300, 3.0 s more than usual ones, 49 % of the run",
        "  step 19: 211 ms, one rank came late (rank 1)",
        "  and 5 more",
        "  1. long steps (3.0 s, 49 % of the run): 15 of 300 steps, every 20th step, take 211 ms",
    ):
        assert line in text, text
    page, source = read_page(out)
    shown = " ".join(page.text)
    assert "15 of 300 steps, every 20th step: 3.0 s more than usual steps" in shown
    assert "one rank came late (rank 1)" in shown
    assert "long in 50 % of step" in shown  # 300 steps are put together, mostly in pairs
    assert 15 <= source.count("<rect class=long") <= 30


class Page(html.parser.HTMLParser):
    """Checks that what is opened is closed, and keeps the text and where links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "srcset", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read_page(path: Path) -> tuple[Page, str]:
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page, text


def test_the_page_is_whole_and_needs_nothing_else(tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", "--html", str(out), *with_slow_rank(300).write(tmp_path)]) == 0
    assert "report.html" in capsys.readouterr().out
    page, text = read_page(out)
    assert not page.outside
    assert "http" not in text
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    shown = " ".join(page.text)
    for words in ("rank 1 is slow", "29.3 %", "Where a step goes", "Overlap", "300 of 300"):
        assert words in shown


def test_names_on_the_page_are_escaped(tmp_path):
    evil = "<script>alert('x')</script>&\"'"
    paths = []
    for rank, path in enumerate(with_slow_rank(5).write(tmp_path)):
        events = json.loads(Path(path).read_text())
        text = json.dumps(events).replace("b to a", evil.replace('"', '\\"'))
        text = text.replace('"host": "a"', f'"host": "{evil.replace(chr(34), "")}{rank}"')
        Path(path).write_text(text)
        paths.append(path)
    out = tmp_path / "report.html"
    assert main(["report", "--html", str(out), *paths]) == 0
    page, text = read_page(out)
    assert "<script" not in text
    assert evil in " ".join(page.text)


def test_a_report_without_steps_says_what_to_do(tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(even(1).events(0)[:4]))
    out = tmp_path / "report.html"
    assert main(["report", "--html", str(out), str(path)]) == 0
    assert "No steps were found" in capsys.readouterr().out
    read_page(out)


def test_what_is_wrong_is_said_without_a_traceback(tmp_path, capsys):
    for arguments in (
        ["merge", str(tmp_path / "out.json"), str(tmp_path / "absent.json")],
        ["report", str(tmp_path / "absent.json")],
    ):
        assert main(arguments) == 1
        assert "absent.json" in capsys.readouterr().err
    paths = even(2).write(tmp_path)
    assert main(["report", "--html", *paths]) == 1  # the first file would be written over
    assert "looks like a timeline" in capsys.readouterr().err
    assert Path(paths[0]).read_text().startswith("[")


@pytest.mark.parametrize("arguments", [["--help"], ["merge", "--help"], ["report", "--help"]])
def test_the_help_teaches_how_to_record_and_view(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    text = capsys.readouterr().out
    for words in ("HOROVOD_TIMELINE", "ui.perfetto.dev", "report --html", "merge all.json"):
        assert words in text
