"""Draw the pictures of docs/dashboard.md.

``python -m tests.observe.dashboard.pictures docs/assets`` does so.

Four minutes of eight simulated ranks on two hosts. One of them stops for five seconds; later the
backward of another is slow. The dark picture has that rank opened.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from horovod.observe.dashboard import page
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.reports import parse_report
from tests.observe.dashboard.browser import Tab, browser
from tests.observe.dashboard.simulated import START, SimulatedJob

SECONDS = 240
STEPS = range(1450, 1561, 10)


def make_board() -> Board:
    job = SimulatedJob(8, per_host=4, compute=0.11)
    board = Board("train.py", START, 1.0)
    board.take_decision(0, job.places(), START)
    told = START
    while job.now < START + SECONDS:
        job.slow_input = {2: 5.0} if told < START + 70 <= job.now else {}
        job.slow = {5: 0.07} if job.now > START + 160 else {}
        told = job.now
        job.run(1 if job.slow_input else 8)
        for rank in range(job.size):
            content: dict[str, Any] = job.report(rank)
            content["stats"]["cpu_seconds"] = (0.9 + 0.01 * rank) * (job.now - START)
            report = parse_report(0, rank, json.dumps(content).encode())
            assert report is not None
            board.take_report(report, job.now)
        board.update(job.now)
    return board


def main(folder: Path) -> None:
    board = make_board()
    lines = [[step, "stdout", f"step {step}: loss {2 / (1 + 0.02 * step):.4f}"] for step in STEPS]
    saved = {"board": board.changes(), "output": {"5": lines}, "ranks": board.all_ranks()}
    with tempfile.NamedTemporaryFile("w", suffix=".html") as file, browser() as chromium:
        file.write(page.render(saved))
        file.flush()
        for scheme in ("light", "dark"):
            tab = Tab(chromium, Path(file.name).as_uri(), color_scheme=scheme)
            tab.page.set_viewport_size({"width": 1180, "height": 800})
            if scheme == "dark":
                tab.page.locator('.cell[data-rank="5"]').click()
                tab.wait_for("document.querySelectorAll('#history-steps polygon').length >= 3")
            tab.wait_for("document.querySelectorAll('#steps-chart polygon').length >= 3")
            tab.page.screenshot(path=str(folder / f"dashboard-{scheme}.png"), full_page=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
