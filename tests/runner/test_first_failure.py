"""Which rank a failed job names: the cause, even where it ends after those that need it."""

from __future__ import annotations

import re

from tests.runner.horovodrun import run_python

# Workers that end in the order of `sys.argv`, each "rank:status". With "rank:others:status" it
# leaves the note that the engine leaves when an operation fails because of others.
ENDING = """
import os, signal, sys, time
from pathlib import Path
from horovod.common.generations import loss_note

loss_note._PATIENCE = 100.0  # however soon the launcher gets the processor
rank = int(os.environ["HOROVOD_RANK"])
folder = Path(sys.argv[1])
order = [each.split(":") for each in sys.argv[2:]]
place = [int(each[0]) for each in order].index(rank)
(folder / f"{rank}.part").write_text(str(os.getpid()))
(folder / f"{rank}.part").rename(folder / f"{rank}")
*because, how = order[place][1:]
for others in because:
    loss_note.leave_note(map(int, others.split(",")))
while not place and not all((folder / each[0]).exists() for each in order):
    time.sleep(0.01)  # the job ends the others soon: they must have begun
if place:
    before = folder / order[place - 1][0]
    while not before.exists():
        time.sleep(0.01)
    while os.path.exists(f"/proc/{before.read_text()}"):
        time.sleep(0.01)
print(f"these are the last words of rank {rank}", file=sys.stderr)
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""


def test_the_cause_is_named_though_it_ends_last(tmp_path):
    done = run_python(3, ENDING, str(tmp_path), "2:1:1", "0:1:1", "1:3", patient=True)
    assert done.returncode == 3, done.stderr
    assert "rank 1 failed: exit code 3" in done.stderr
    assert re.search(r"^  1     localhost  \d+ +exit code 3$", done.stderr, re.MULTILINE)
    assert "  these are the last words of rank 1\n" in done.stderr
    assert "2 other ranks failed because of it (0,2)." in done.stderr


def test_a_rank_that_heard_of_the_loss_from_another_leads_to_the_cause(tmp_path):
    done = run_python(3, ENDING, str(tmp_path), "2:0:1", "0:1:1", "1:kill", patient=True)
    assert done.returncode == 137, done.stderr
    assert re.search(r"^  1     localhost  \d+ +killed by SIGKILL", done.stderr, re.MULTILINE)


def test_a_rank_that_ended_well_while_others_needed_it_is_the_cause(tmp_path):
    done = run_python(3, ENDING, str(tmp_path), "1:0", "0:1:7", "2:0:1", patient=True)
    assert done.returncode == 7, done.stderr
    assert re.search(
        r"The cause was:\n\n.*\n  1     localhost  \d+ +exit code 0, while other ranks still",
        done.stderr,
    )
    assert "stderr of rank 0, which needed it" in done.stderr
    assert "  these are the last words of rank 0\n" in done.stderr


def test_without_a_note_a_rank_failed_by_itself(tmp_path):
    done = run_python(2, ENDING, str(tmp_path), "0:4", "1:5")
    assert done.returncode == 4, done.stderr
