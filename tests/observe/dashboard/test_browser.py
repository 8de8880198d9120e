"""The page in a real browser: simulated ranks of many kinds, and a live elastic job."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from horovod.runner.output.lines import Line
from horovod.runner.output.report import Exit, Outcome
from tests.observe.dashboard.browser import Tab, browser
from tests.observe.dashboard.served import TOKEN, Served, served
from tests.runner.horovodrun import HANG, command, environment

pytestmark = pytest.mark.usefixtures("never_silent")
SHOTS = os.environ.get("DASHBOARD_SHOTS")  # a folder for pictures, to be looked at


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


def link(job: Served) -> str:
    return f"http://127.0.0.1:{job.port}/?token={TOKEN}"


def shoot(tab: Tab, name: str) -> None:
    if SHOTS:
        tab.page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def test_the_token_leaves_the_address_and_nothing_comes_from_elsewhere(chromium: Any):
    with served() as job:
        job.train()
        tab = Tab(chromium, link(job))
        tab.shows(".cell", "rank 2")
        assert tab.page.url == f"http://127.0.0.1:{job.port}/"
        assert tab.page.evaluate("document.cookie") == "", "scripts cannot read it"
        tab.page.reload()
        tab.shows(".cell", "rank 2")
        assert all(url.startswith(f"http://127.0.0.1:{job.port}/") for url in tab.asked)
        assert tab.complaints == []
        with pytest.raises(Exception, match="ERR_HTTP_RESPONSE_CODE_FAILURE"):
            Tab(chromium, f"http://127.0.0.1:{job.port}/")  # has no cookie


def test_the_page_shows_ranks_charts_and_stragglers(chromium: Any):
    with served(4) as job:
        job.train(20)
        tab = Tab(chromium, link(job))
        tab.shows("#title", "train.py")
        tab.shows("#numbers", "ranks")
        tab.wait_for("document.querySelectorAll('.cell').length === 4")
        tab.wait_for("document.querySelectorAll('.host').length === 2")
        tab.shows(".cell.training", "step 20")
        tab.wait_for("document.querySelectorAll('#steps-chart polygon').length >= 3")
        tab.shows("#metrics h3", "loss")
        job.job.slow = {1: 0.1}
        job.settle()
        tab.shows(".cell.slow .reason", "late in backward")
        assert tab.page.locator(".cell.slow").get_attribute("data-rank") == "1"
        tab.shows("#events .what", "rank 1: late in backward")
        tab.page.locator(".cell").nth(1).click()
        tab.shows("#chosen-try", "Look at the cores or the GPU there")
        job.job.slow = {}
        job.job.slow_link = {3: 0.1}
        job.settle()
        tab.shows(".cell.slow .reason", "slow link")
        assert tab.complaints == []


def test_one_rank_over_time_with_its_stack_and_a_part_of_the_time(chromium: Any, tmp_path: Path):
    path = tmp_path / "saved.html"
    job = Served(3, save=str(path), per_host=3, cores=2)
    for ago in (12.0, 9.0, 6.0):
        job.train(20, ago)
    job.job.slow_input = {1: 5.0}
    job.train(1)  # one long step: the axis is for the others
    job.job.slow_input = {}
    job.train(20)
    job.dashboard.note("stack", worker=1, text="Thread 1\n    here (train.py:7) <b>")
    tab = Tab(chromium, link(job))
    tab.shows("#notice", "3 ranks share 2 cores")
    tab.page.locator(".cell").nth(1).click()
    tab.shows("#stack-lines", "here (train.py:7) <b>")
    tab.wait_for("document.querySelectorAll('#history-steps polygon').length >= 3")
    tab.shows("#history-use h3", "Processor")
    tab.shows("#history-use h3", "Memory")
    tab.wait_for("document.querySelectorAll('#steps-chart path.spike title').length === 1")
    assert "a step of 5" in tab.page.locator("#steps-chart path.spike title").text_content()

    chart = tab.page.locator("#steps-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.page.mouse.move(box["x"] + 80, box["y"] + 80)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 200, box["y"] + 80, steps=3)
    tab.page.mouse.up()
    tab.wait_for("document.getElementById('range').value === 'fixed'")
    shoot(tab, "zoomed")
    tab.page.keyboard.press("Escape")
    tab.wait_for("document.getElementById('range').value === 'all'")
    tab.page.select_option("#range", "60")
    failed(job)
    file = Tab(chromium, path.as_uri())
    for each in (tab, file):
        each.shows(".cell.failed", "rank 1")
        each.shows(".cell.ended .reason", "stopped by the launcher")
    file.page.locator(".cell").nth(1).click()
    file.shows("#stack-lines", "here (train.py:7) <b>")
    file.wait_for("document.querySelectorAll('#history-steps polygon').length >= 3")
    assert tab.complaints == file.complaints == []


def test_a_stall_with_its_source_line(chromium: Any):
    with served(3) as job:
        job.train(20)
        waiting = {
            "since": time.time() - 7,
            "tensors": ["grad.layer1", "grad.layer2"],
            "missing_ranks": [1],
            "source": "train.py:41",
        }
        stall = {"state": "waiting", "waiting": waiting}
        job.train(0, rank0=stall, rank2=stall)
        tab = Tab(chromium, link(job))
        tab.shows("#stalls", "ranks 0, 2 wait for rank 1")
        tab.shows("#stalls code", "grad.layer1, grad.layer2")
        tab.shows("#stalls code", "train.py:41")
        tab.shows("#status", "Waiting")
        tab.shows(".cell.slow .reason", "2 ranks have waited")


def test_hostile_strings_are_text(chromium: Any):
    hostile = (
        "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    )
    with served(2) as job:
        job.train(20, rank0={"metrics": {hostile: [[1, 2.0], [2, 3.0]]}})
        waiting = {"since": time.time(), "tensors": [hostile], "missing_ranks": [1]}
        job.train(0, rank0={"waiting": {**waiting, "source": hostile}, "host": hostile})
        job.dashboard.note("decision", number=1, workers={"w0": [hostile, 0], "w1": ["b", 1]})
        job.dashboard.note("blacklisted", message=hostile)
        job.dashboard.output(0, 0, "stdout", [Line(hostile.encode(), b"\n")])
        tab = Tab(chromium, link(job))
        tab.shows("#events .what", hostile)
        tab.page.locator(".cell").first.click()
        tab.shows("#output", hostile)
        tab.shows(".host h3", "<img src=x")
        tab.shows("#metrics h3", "<img src=x")
        assert tab.page.locator("img").count() == 0
        assert "owned" not in tab.page.title()
        assert tab.complaints == []


def test_keyboard_and_labels(chromium: Any):
    with served(3) as job:
        job.train(20)
        job.dashboard.output(1, 1, "stdout", [Line(b"a line of rank 1", b"\n")])
        tab = Tab(chromium, link(job))
        tab.shows(".cell.training", "rank 1")
        cell = tab.page.locator(".cell").nth(1)
        tab.wait_for("document.querySelectorAll('.cell')[1].ariaLabel.endsWith('of the time')")
        label = cell.get_attribute("aria-label")
        assert label.startswith("rank 1 on node00, training, step 20, ")
        assert re.search(r", [\d.]+ steps per second, waits \d+ % of the time$", label)
        for _ in range(30):
            tab.page.keyboard.press("Tab")
            if tab.page.evaluate("document.activeElement.dataset.rank") == "1":
                break
        tab.page.keyboard.press("Enter")
        tab.shows("#chosen-title", "Rank 1 on node00")
        tab.shows("#output", "a line of rank 1")
        assert cell.get_attribute("aria-pressed") == "true"
        tab.page.keyboard.press("Escape")
        tab.wait_for("document.getElementById('chosen').hidden")
        chart = tab.page.locator("#steps-chart svg")
        assert chart.get_attribute("role") == "img"
        assert "compute" in chart.get_attribute("aria-label")
        for selector in ("button", "select"):
            for element in tab.page.locator(selector).all():
                name = (
                    "e => e.getAttribute('aria-label') || e.textContent || e.labels[0].textContent"
                )
                assert element.evaluate(name).strip(), selector


@pytest.mark.parametrize("width", [390, 1280, 2200])
def test_256_ranks_at_any_width(chromium: Any, width: int):
    with served(256) as job:
        job.job.slow = {77: 0.1}
        job.settle()
        tab = Tab(chromium, link(job))
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.wait_for("document.querySelectorAll('.cell').length === 256")
        tab.shows("#attention", "late in backward")
        tab.page.select_option("#filter", "slow")
        tab.wait_for("document.querySelectorAll('.cell').length === 1")
        tab.page.select_option("#filter", "all")
        overflow = tab.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0
        shoot(tab, f"many-{width}")
        assert tab.complaints == []


def failed(job: Served) -> None:
    outcome = Outcome(first_failure=Exit(1, 4711, -9, "node00"), account="Last words: <b>out</b>\n")
    job.dashboard.note("exited", worker="1", host="node00", code=-9)
    job.dashboard.note("exited", worker="0", host="node00", code=-15, stopped=True)
    job.dashboard.ended(outcome)
    job.dashboard.close()


def test_the_end_is_shown_and_the_saved_file_shows_the_same(chromium: Any, tmp_path: Path):
    path = tmp_path / "saved.html"
    job = Served(3, save=str(path))
    job.train(20)
    job.dashboard.output(1, 1, "stderr", [Line(b"MemoryError: <b>", b"\n")])
    tab = Tab(chromium, link(job))
    tab.shows(".cell.training", "step 20")
    failed(job)
    file = Tab(chromium, path.as_uri())
    for each in (tab, file):
        each.shows("#banner", "The job has failed: exit code 137.")
        each.shows("#cause", "rank 1 on node00: killed by SIGKILL")
        each.shows("#banner pre", "Last words: <b>out</b>")
        each.shows(".cell.failed", "rank 1")
        each.shows("#metrics h3", "loss")
        each.wait_for("document.querySelectorAll('#steps-chart polygon').length >= 3")
    file.page.locator(".cell").nth(1).click()
    file.shows("#output", "MemoryError: <b>")
    assert file.asked == [path.as_uri()]
    assert tab.complaints == file.complaints == []


def test_the_page_saves_itself_even_when_the_launcher_is_gone(chromium: Any, tmp_path: Path):
    job = Served(3)
    job.train(20)
    job.dashboard.output(0, 0, "stdout", [Line(b"said </script> something", b"\n")])
    tab = Tab(chromium, link(job), accept_downloads=True)
    tab.shows(".cell.training", "step 20")
    tab.page.locator(".cell").first.click()
    tab.shows("#output", "said")
    failed(job)
    tab.shows("#banner", "exit code 137")
    with tab.page.expect_download() as download:
        tab.page.locator("#save").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name == "horovod-train.py.html"
    file = Tab(chromium, path.as_uri())
    file.shows("#banner", "exit code 137")
    file.shows(".cell.failed", "rank 1")
    file.page.locator(".cell").first.click()
    file.shows("#output", "said </script> something")
    assert file.complaints == []


def test_a_launcher_that_is_gone_is_told(chromium: Any):
    with served(3) as job:
        job.train(20)
        tab = Tab(chromium, link(job))
        tab.shows(".cell.training", "step 20")
        tab.page.route("**/changes*", lambda route: route.abort("connectionrefused"))
        job.train(20)  # answers the question that is held
        tab.shows("#status", "No answer")
        tab.shows("#banner", "The launcher does not answer")
        assert tab.page.locator(".cell").count() == 3, "what was known last stays"
        tab.page.unroute("**/changes*")
        tab.shows("#status", "Running")
        tab.wait_for("document.getElementById('banner').hidden")


# -- a live job ------------------------------------------------------------------------------


class LiveJob:
    """horovodrun --dashboard with an elastic job of three ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved = folder / "saved.html"
        self.output: list[str] = []
        options = ["-np", "3", "--min-np", "2", "--max-worker-failures", "9", "--dashboard", ":0"]
        options += ["--dashboard-save", str(self.saved)]
        worker = Path(__file__).with_name("live_worker.py")
        self.process = subprocess.Popen(
            command(*options, sys.executable, str(worker), str(folder)),
            # Stopped for as long as a loaded machine takes to show it: nobody is given up for that.
            env=environment({"OMP_NUM_THREADS": "1", "HOROVOD_ELASTIC_ANSWER_TIMEOUT": "200"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._linked = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if "token=" in line:
                self._linked.set()
        self._linked.set()

    @property
    def link(self) -> str:
        assert self._linked.wait(HANG)
        return re.search(r"http://\S+", "".join(self.output))[0]

    def pid(self, rank: int) -> int:
        return int((self.folder / f"rank{rank}.pid").read_text())

    def finish(self) -> int:
        (self.folder / "end").touch()
        status = self.process.wait(HANG)
        self._reader.join()
        return status


@contextlib.contextmanager
def live_job(folder: Path) -> Iterator[LiveJob]:
    job = LiveJob(folder)
    try:
        yield job
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(job.pid(1), signal.SIGCONT)
        if job.process.poll() is None:
            job.process.terminate()
        job.process.wait(HANG)


@pytest.mark.timeout(600)
def test_a_live_job_whose_rank_is_slow_stopped_and_killed(chromium: Any, tmp_path: Path):
    with live_job(tmp_path) as job:
        tab = Tab(chromium, job.link)
        tab.shows("#status", "Running")
        tab.wait_for("document.querySelectorAll('.cell.training').length === 3")
        tab.shows("#metrics h3", "loss")
        tab.shows("#events .what", "formed with 3 workers")
        tab.page.locator('.cell[data-rank="2"]').click()
        tab.shows("#output", "<i>loss</i>")

        (tmp_path / "slow").write_text("0.3")
        tab.shows('.cell.slow[data-rank="1"] .reason', "late in backward")
        shoot(tab, "live-slow")
        (tmp_path / "slow").write_text("0")
        tab.shows('.cell.training[data-rank="1"]', "rank 1")

        os.kill(job.pid(1), signal.SIGSTOP)
        tab.shows('.cell.stopped[data-rank="1"] .reason', "stopped by a signal (state T)")
        tab.shows("#stalls", "for rank 1")
        tab.page.locator('.cell[data-rank="1"]').click()
        tab.wait_for("document.getElementById('stack-lines').textContent !== ''")
        shoot(tab, "live-stopped")
        os.kill(job.pid(1), signal.SIGCONT)
        tab.shows('.cell.training[data-rank="1"]', "rank 1")
        tab.wait_for("document.getElementById('stalls').hidden")

        os.kill(job.pid(1), signal.SIGKILL)
        tab.shows("#events .lost + .what", "lost: killed by SIGKILL")
        tab.shows("#events .formed + .what", "re-formed with")
        tab.wait_for("document.querySelectorAll('#steps-chart g[data-kind=lost]').length === 1")
        tab.shows("#events .joined + .what", "joins as rank")
        tab.wait_for("document.querySelectorAll('.cell.training').length === 3")
        shoot(tab, "live-killed")
        assert job.finish() == 0, "".join(job.output)
        tab.shows("#banner", "The job has finished: exit code 0.")
        shoot(tab, "live-ended")
        assert tab.complaints == []
        token = job.link.partition("token=")[2]
        assert "".join(job.output).count(token) == 1
        file = Tab(chromium, job.saved.as_uri(), color_scheme="dark")
        file.shows("#banner", "exit code 0")
        file.shows("#events .lost + .what", "killed by SIGKILL")
        assert token not in job.saved.read_text()
