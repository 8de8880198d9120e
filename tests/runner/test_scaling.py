"""``horovodrun --scaling``: real jobs of several sizes; the numbers come from made reports."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.common.store import MemoryStore
from horovod.observe.reports.scaling import (
    Published,
    Report,
    Run,
    _errors,
    draw,
    read_published,
    table,
)
from horovod.runner.options.arguments import make_options
from horovod.runner.scaling import steps_per_second
from tests.runner import stub_ssh
from tests.runner.horovodrun import HANG, command, environment, run

BIN = os.path.dirname(sys.executable)  # where the wheel of Open MPI puts mpirun
SAY = "import os; print(os.environ['HOROVOD_SIZE'], os.environ['HOROVOD_SCALING_FRACTION'])"

# As a rank reports its steps: of n ranks each makes 12 - 2 n steps in a second.
REPORT = """
import json, os
from horovod.common.store import StoreClient
from horovod.common.wire import decode_key
address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{what}"] for what in ("ADDR", "PORT"))
store = StoreClient(address, int(port), decode_key(os.environ["_HOROVOD_SECRET_KEY"]), 200)
assert float(os.environ["HOROVOD_STATS_INTERVAL"]) > 0
rank, size = os.environ["HOROVOD_RANK"], int(os.environ["HOROVOD_SIZE"])
stats = {"steps": 120 - 20 * size, "step_seconds": 10.0, "steps_per_second": 99.0}
store.set(f"stats/0/{rank}", json.dumps({"version": 1, "stats": stats}).encode())
"""


def study(folder: Path, *arguments: str, program: str = SAY, **env: str):
    return run(*arguments, sys.executable, "-c", program, cwd=folder, env=env)


def rows(path: Path) -> dict[int, dict[str, str]]:
    with path.open(newline="") as file:
        return {int(row["ranks"]): row for row in csv.DictReader(file)}


# -- studies ---------------------------------------------------------------------------------------


def test_sizes_take_turns_and_the_work_of_each_rank_stays_the_same(tmp_path: Path):
    done = study(tmp_path, "--scaling", "2,1", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^horovodrun: scaling: (.* \(run . of 2\))$", done.stderr, re.MULTILINE)
    assert said == [
        "1 rank (run 1 of 2)",
        "2 ranks (run 1 of 2)",
        "1 rank (run 2 of 2)",
        "2 ranks (run 2 of 2)",
    ]
    assert done.stdout.count(":1 1.0\n") == 2
    assert done.stdout.count(":2 1.0\n") == 4
    assert "ranks  time (s)  spread  speed-up  efficiency\n" in done.stdout
    assert "no estimate of its error" not in done.stdout
    assert (
        "weak scaling, medians of 2 runs; speed-up and efficiency relative to 1 rank, by time"
        in (done.stdout)
    )
    found = rows(tmp_path / "scaling.csv")
    assert list(found) == [1, 2]
    for row in found.values():
        assert row["mode"] == "weak"
        assert row["runs"] == "2"
        both = [float(each) for each in row["all_seconds"].split()]
        assert float(row["seconds"]) == pytest.approx(sum(both) / 2, abs=0.002)
        apart = 100 * (max(both) - min(both)) / (sum(both) / 2)
        rounding = 100 * 0.004 / (sum(both) / 2)  # of the seconds in the file
        assert float(row["spread_percent"]) == pytest.approx(apart, abs=0.1 + rounding)
    one, two = (float(found[size]["seconds"]) for size in (1, 2))
    assert float(found[2]["efficiency"]) == pytest.approx(one / two, rel=0.05)
    assert float(found[2]["speedup"]) == pytest.approx(2 * one / two, rel=0.05)


def test_a_strong_study_hands_out_the_fraction_and_goes_by_time(tmp_path: Path):
    published = tmp_path / "cluster.csv"
    published.write_text("Ranks, seconds\n1,500\n8,58.8\n")
    done = study(
        tmp_path,
        *("--scaling", "1,3", "--strong", "--scaling-published", str(published)),
        *("--scaling-output", "mine"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f":3 {1 / 3!r}\n") == 3
    assert done.stdout.count(":1 1.0\n") == 1
    text = done.stdout
    assert re.search(r"^this study +\|  cluster$", text, re.MULTILINE)
    assert re.search(r"^    1 +[\d.]+ +1.00 +100%  \|    500.00      1.00        100%$", text, re.M)
    assert re.search(r"^    8 +- +- +-  \|     58.80      8.50        106%$", text, re.M)
    found = rows(tmp_path / "mine.csv")
    one, three = (float(found[size]["seconds"]) for size in (1, 3))
    assert float(found[3]["speedup"]) == pytest.approx(one / three, rel=0.05)
    assert float(found[3]["efficiency"]) == pytest.approx(one / three / 3, rel=0.05)
    assert found[8]["published_speedup"] == "8.5034"
    assert found[8]["seconds"] == ""
    again = read_published(str(tmp_path / "mine.csv"))
    assert again.strong
    assert sorted(again.runs) == [1, 3], "its own file can be compared with"


def test_steps_are_what_a_weak_study_goes_by(tmp_path: Path):
    done = study(tmp_path, "--scaling", "1,2,4", program=REPORT)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "scaling.csv")
    assert [float(row["steps_per_second"]) for row in found.values()] == [10.0, 8.0, 4.0]
    assert [float(row["efficiency"]) for row in found.values()] == [1.0, 0.8, 0.4]
    assert [float(row["speedup"]) for row in found.values()] == [1.0, 1.6, 1.6]
    assert "relative to 1 rank, by steps per second" in done.stdout
    assert "scaling: 2 ranks: " in done.stderr
    assert " s, 8 steps/s" in done.stderr


def test_a_size_that_fails_is_named_and_the_others_are_measured(tmp_path: Path):
    program = "import os, sys; sys.exit(7 if os.environ['HOROVOD_SIZE'] == '2' else 0)"
    done = study(tmp_path, "--scaling", "1,2,3", "--repeat", "2", program=program)
    assert done.returncode == 7
    assert re.search(r"^    2 +failed +- +- +-$", done.stdout, re.MULTILINE)
    assert "scaling: 2 ranks failed: rank " in done.stderr
    assert "The first to fail was:" in done.stderr
    assert done.stderr.count("scaling: 2 ranks (run") == 1, "it is not tried again"
    assert [row["runs"] for row in rows(tmp_path / "scaling.csv").values()] == ["2", "0", "2"]


def test_a_command_that_cannot_work_is_not_tried_at_every_size(tmp_path: Path):
    done = study(tmp_path, "--scaling", "1,2,4", program="raise SystemExit(5)")
    assert done.returncode == 5
    assert "scaling: 1 rank failed: rank 0 ended with exit code 5" in done.stderr
    assert "scaling: not measured: 2 ranks, 4 ranks" in done.stderr
    assert "speed-up" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_it_with_the_table_so_far(tmp_path: Path):
    program = (
        "import os, time\n"
        "if os.environ['HOROVOD_SIZE'] == '2':\n"
        "    print('waits', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        command("--scaling", "1,2,3", sys.executable, "-c", program),
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert "waits" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert re.search(r"^    1 +[\d.]+ +1.00 +100%$", out, re.MULTILINE)
    assert re.search(r"^    2 +- +- +-$", out, re.MULTILINE)
    assert "scaling: not measured: 2 ranks, 3 ranks" in err
    assert rows(tmp_path / "scaling.csv")[1]["runs"] == "1"


def test_output_of_every_run_is_kept_apart(tmp_path: Path):
    done = study(tmp_path, "--scaling", "1,2", "--repeat", "2", "--output-filename", "logs")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["1-ranks.run-1", "1-ranks.run-2", "2-ranks.run-1", "2-ranks.run-2"]
    kept = tmp_path / "logs" / "2-ranks.run-2" / "rank.1" / "stdout"
    assert kept.read_text() == "2 1.0\n"


def test_on_several_hosts_they_are_filled_in_the_order_given(tmp_path: Path):
    stub = stub_ssh.install(tmp_path)
    program = "import os; print('on', os.environ['HOROVOD_HOSTNAME'], os.environ['HOROVOD_SIZE'])"
    done = study(tmp_path, "--scaling", "1,3", "-H", "alpha:2,beta:1", program=program, **stub)
    assert done.returncode == 0, done.stderr
    found = sorted(line.partition("on ")[2] for line in done.stdout.splitlines() if ":on" in line)
    assert found == ["alpha 1", "alpha 3", "alpha 3", "beta 3"]
    done = study(tmp_path, "--scaling", "1,2", "-H", "alpha:1,unknown1:1", **stub)
    assert done.returncode == 1
    assert "scaling: 2 ranks failed: cannot start on unknown1: " in done.stderr
    assert re.search(r"^    1 +[\d.]+ +1.00 +100%$", done.stdout, re.MULTILINE)


def test_the_disk_is_full(tmp_path: Path):
    (tmp_path / "full.csv.partial").symlink_to("/dev/full")
    done = study(tmp_path, "--scaling", "1", "--scaling-output", "full")
    assert done.returncode == 1
    assert "speed-up" in done.stdout
    assert "scaling: cannot write full.csv: No space left on device" in done.stderr


def test_a_dry_run_shows_every_size_and_starts_nothing(tmp_path: Path):
    done = study(tmp_path, "--scaling", "1,2", "--strong", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "== 1 rank, 1 time" in done.stdout
    assert "== 2 ranks, 1 time" in done.stdout
    assert "HOROVOD_SCALING_FRACTION=0.5" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("mpirun", path=BIN) is None, reason="there is no mpirun")
def test_with_mpirun(tmp_path: Path):
    path = os.pathsep.join([BIN, os.environ["PATH"]])
    allowed = {"PATH": path} | {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
    program = "import os; os.write(1, b'fraction %s\\n' % os.environb[b'HOROVOD_SCALING_FRACTION'])"
    options = ("--scaling", "1,2", "--strong", "--mpi", "--mpi-args=--oversubscribe")
    done = study(tmp_path, *options, program=program, **allowed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fraction 0.5") == 2
    assert done.stdout.count("fraction 1.0") == 1
    assert [row["runs"] for row in rows(tmp_path / "scaling.csv").values()] == ["1", "1"]


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--scaling 0,1 true", "argument --scaling: a job has at least 1 process, not 0"),
        ("--scaling 1,2,1 true", "argument --scaling: 1 is there twice; --repeat runs"),
        ("--scaling 1,two true", "argument --scaling: 'two' is not a number of processes"),
        ("--scaling 1,-2 true", "argument --scaling: '-2' is not a number of processes"),
        ("--scaling= true", "argument --scaling: '' is not a number of processes"),
        ("--scaling 1,2", "say what to run, for example: horovodrun --scaling 1,2 python"),
        ("--scaling 1,2 -np 2 true", "argument --scaling: it says how many processes"),
        ("--scaling 1,2 --repeat 0 true", "argument --repeat: must be 1 or more, not 0"),
        (
            "--scaling 1,4,8 -H a:2,b:2 true",
            "argument --scaling: 8 processes do not fit, the hosts offer 4 slots",
        ),
        ("--scaling 1,2 --min-np 1 true", "not possible in an elastic job, whose size changes; "),
        ("--scaling 1,2 --host-discovery-script true true", "leave out --host-discovery-script"),
        ("--scaling 1,2 --reset-limit 3 true", "leave out --reset-limit"),
        ("--scaling 1,2 --attach 0 true", "argument --attach: not possible with --scaling"),
        ("-np 2 --repeat 2 true", "argument --repeat: it is for a study with --scaling"),
        ("-np 2 --strong true", "argument --strong: it is for a study with --scaling"),
        ("--scaling 1 --scaling-published no.csv true", "there is no file 'no.csv'"),
    ],
)
def test_options_that_describe_no_study(arguments: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_options(arguments.split())


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("--scaling 1,1 true", 2, "error: argument --scaling: 1 is there twice"),
        ("--scaling 1 --scaling-output no/where true", 2, "there is no directory"),
        (f"--scaling 1 --scaling-published {__file__} true", 2, "argument --scaling-published: "),
        ("--scaling 1,2 no-such-command", 127, "command not found: 'no-such-command'"),
        ("--scaling 1,2 --mpi --output-ranks 0 true", 2, "--output-ranks: not possible with --mpi"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    tmp_path: Path, arguments: str, status: int, message: str
):
    done = run(*arguments.split(), cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "failed" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_slots_of_a_hostfile_count(tmp_path: Path):
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    done = run("--scaling", "1,2", "--hostfile", "hosts", "true", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 processes do not fit, the hosts offer 1 slots" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it has no column ranks and no column seconds"),
        ("ranks,time\n1,2\n", "it has no column seconds; its first line must name the columns"),
        ("1,500\n8,58.8\n", "it has no column ranks"),
        ("ranks,seconds\n", "it has no rows"),
        ("ranks,seconds\n1,fast\n", "line 2: seconds 'fast' is not a number above 0"),
        ("ranks,seconds\n1,-3\n", "line 2: seconds '-3' is not a number above 0"),
        ("ranks,seconds\n1,nan\n", "line 2: seconds 'nan' is not a number above 0"),
        ("ranks,seconds\n1.5,3\n", "line 2: ranks '1.5' is not a whole number"),
        ("ranks,seconds\n1,3\n1,4\n", "line 3: 1 ranks for the second time"),
        ("ranks,seconds,mode\n1,3,fast\n", "its column mode must say weak, or strong"),
        ("ranks,seconds\n1,\xff\n", ""),
    ],
)
def test_what_is_wrong_with_a_published_file(tmp_path: Path, content: str, message: str):
    path = tmp_path / "published.csv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError) as caught:
        read_published(str(path))
    assert message in str(caught.value)


def test_the_published_file_is_never_written_over(tmp_path: Path):
    (tmp_path / "scaling.csv").write_text("ranks,seconds\n1,500\n")
    done = study(tmp_path, "--scaling", "1", "--scaling-published", "scaling.csv")
    assert done.returncode == 2
    assert "'scaling.csv' is the published run itself; choose another prefix" in done.stderr
    assert (tmp_path / "scaling.csv").read_text() == "ranks,seconds\n1,500\n"


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"version": 1, "stats": 3}',
        b'{"version": 1, "stats": {}}',
        b'{"version": 1, "stats": {"steps": "9", "step_seconds": 1}}',
        b'{"version": 1, "stats": {"steps": 9, "step_seconds": NaN, "steps_per_second": null}}',
        b'{"version": 1, "stats": {"steps": true, "step_seconds": true}}',
        b"[" * 100_000,
        b'{"version": 1, "stats": {"steps": 9, "step_seconds": 3}}' + b" " * (1 << 20),
    ],
)
def test_a_report_that_makes_no_sense_is_no_report(content: bytes):
    store = MemoryStore()
    assert steps_per_second(store, 2) is None
    store.set("stats/0/0", content)
    assert steps_per_second(store, 2) is None
    store.set("stats/0/1", b'{"version": 1, "stats": {"steps": 9, "step_seconds": 3}}')
    assert steps_per_second(store, 2) == 3.0


def test_without_a_time_for_the_steps_the_rate_of_the_last_ones_counts():
    store = MemoryStore()
    store.set("stats/0/0", b'{"version": 1, "stats": {"steps": 9, "steps_per_second": 2.5}}')
    assert steps_per_second(store, 1) == 2.5


def test_medians_and_a_smallest_size_above_one():
    report = Report(strong=True)
    report.runs = {2: [Run(2, 10.0), Run(2, 90.0), Run(2, 12.0)], 8: [Run(8, 4.0)]}
    assert report.rows[2].seconds == 12.0
    assert report.rows[8].speedup == 3.0
    assert report.rows[8].efficiency == 0.75
    text = table(report, [2, 8])
    assert "relative to 2 ranks" in text
    assert "The runs of 2 ranks took 10.00 to 90.00 s: something else used the machine." in text
    report.runs[2][1] = Run(2, 11.5)
    text = table(report, [2, 8])
    assert "something else" not in text
    assert re.search(r"^    2     11.50     17%      1.00        100%$", text, re.MULTILINE)
    assert re.search(r"^    8      4.00       -      2.88         72%$", text, re.MULTILINE)


def test_what_speaks_against_the_numbers_is_said():
    report = Report(strong=True)
    report.runs = {1: [Run(1, 10.0)], 2: [Run(2, 4.6)], 4: [Run(4, 2.2)]}  # 109 and 114 %
    text = table(report, [1, 2, 4])
    assert "One run of a size has no estimate of its error: --repeat 3 gives one." in text
    assert "Efficiency above 110% at 4 ranks: " in text
    report.runs = {1: [Run(1, 10.0)] * 3, 2: [Run(2, 4.6)] * 3}
    text = table(report, [1, 2])
    assert "no estimate" not in text
    assert "Efficiency above" not in text


def test_errors_of_the_chart_are_those_of_what_it_shows():
    runs = [Run(2, 10.0, 8.0), Run(2, 20.0, 10.0), Run(2, 40.0, 11.0)]
    by_time = _errors([3.0], [runs], by_steps=False)
    assert by_time == [[pytest.approx(1.5)], [pytest.approx(3.0)]]
    by_steps = _errors([3.0], [runs], by_steps=True)
    assert by_steps == [[pytest.approx(0.6)], [pytest.approx(0.3)]]
    assert _errors([3.0], [[]], by_steps=False) == [[0.0], [0.0]]


def test_steps_of_some_sizes_only_do_not_decide():
    report = Report(strong=False)
    report.runs = {1: [Run(1, 10.0, 5.0)], 2: [Run(2, 20.0)]}
    assert report.rows[2].efficiency == 0.5
    assert "by time" in table(report, [1, 2])


def test_a_published_run_keeps_its_own_mode():
    published = Published("gpus", {1: Run(1, 500.0), 8: Run(8, 58.8)}, strong=True)
    report = Report(False, published, {1: [Run(1, 10.0)], 8: [Run(8, 20.0)]})
    text = table(report, [1, 8])
    assert "gpus (strong)" in text
    assert re.search(
        r"    8     20.00      4.00         50%  \|     58.80      8.50        106%", text
    )


def test_the_chart(tmp_path: Path):
    pytest.importorskip("matplotlib")
    report = Report(False, None, {1: [Run(1, 10.0)], 2: [Run(2, 11.0)]})
    assert draw(report, str(tmp_path / "x.png")) == ""
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "no directory" in draw(report, str(tmp_path / "no" / "x.png")).lower().replace(
        "such file or ", ""
    )


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = study(tmp_path, "--scaling", "1", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert "no scaling.png: it needs matplotlib, pip install matplotlib" in done.stderr
    assert (tmp_path / "scaling.csv").exists()
    assert not (tmp_path / "scaling.png").exists()
