"""Running an example the way a user does, and comparing what its ranks ended with.

Ranks are forked from a process that has torch already, which saves most of the time that a short
run takes; with `fresh` each starts a Python of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.forked_python import forked_python
from tests.ranks import clean_environment

ROOT = Path(__file__).resolve().parents[2]
PYTORCH = ROOT / "examples" / "pytorch"
HANG = 200.0  # seconds; no example that is cut short takes a tenth of it

# Runs a script as it is; then every rank prints a checksum of all parameters it optimized last.
CHECKSUM = """
import hashlib, os, runpy, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

stepped = []

def note(optimizer, *_):
    stepped[:] = [optimizer]

register_optimizer_step_post_hook(note)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
digest = hashlib.sha256()
for group in stepped[0].param_groups:
    for parameter in group["params"]:
        digest.update(parameter.detach().cpu().numpy().tobytes())
print("checksum", digest.hexdigest(), flush=True)
"""


def run_example(
    script: str,
    *options: str | Path,
    cwd: Path,
    launcher: str | None = "horovodrun",
    ranks: int = 2,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run an example to its end: alone, or with some ranks under a launcher."""
    command = [str(PYTORCH / script), *map(str, options)]
    return _run(_started_by(launcher, command, ranks, fresh), cwd)


def run_with_checksums(
    script: str, *options: str | Path, cwd: Path, fresh: bool = False
) -> tuple[str, str]:
    """What an example prints on two ranks, and the checksum of the parameters they end with."""
    program = cwd / "with_checksum.py"
    program.write_text(CHECKSUM)
    command = [str(program), str(PYTORCH / script), *map(str, options)]
    done = _run(_started_by("horovodrun", command, fresh=fresh), cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"\[(\d)\]<stdout>:checksum (\w+)", done.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"], done.stdout + done.stderr
    assert found[0][1] == found[1][1], "the ranks ended with different parameters"
    return done.stdout, found[0][1]


def _started_by(
    launcher: str | None, command: list[str], ranks: int = 2, fresh: bool = False
) -> list[str]:
    size = str(ranks)
    python = [sys.executable] if fresh else forked_python()
    if launcher is None:
        return [*python, *command]
    if launcher == "horovodrun":
        return [sys.executable, "-m", "horovod.runner", "-np", size, *python, *command]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
        return [*torchrun, "--nproc-per-node", size, *python, *command]
    assert launcher == "mpirun"
    beside = str(Path(sys.executable).parent)  # that of the environment the tests run in
    mpirun = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    assert mpirun, "mpirun is not installed"
    root = ["--allow-run-as-root", "--oversubscribe"]
    return [mpirun, *root, "-np", size, *python, *command]


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = clean_environment() | {"PYTHONPATH": str(ROOT), "HOROVOD_START_TIMEOUT": "200"}
    environ.pop("OMP_NUM_THREADS", None)  # as a user has it
    return subprocess.run(
        command,
        env=environ,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
