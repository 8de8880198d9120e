#!/usr/bin/env python
"""How fast a collective is: Horovod against torch.distributed's Gloo and against Open MPI.

Run by people, and with --check by whoever guards the project's promises. This process starts the
ranks (`benchmarks.collectives_rank`), shows progress and reports; see --help.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.collectives_report import (  # noqa: E402
    LABELS,
    Duel,
    Results,
    Run,
    human,
    requirements,
    table,
    write_csv,
    write_plot,
)
from benchmarks.processes import (  # noqa: E402
    Progress,
    environment,
    follow,
    positive,
    processes,
    torchrun_environments,
)
from benchmarks.promises import add_options, all_met, warn_if_busy, write_files  # noqa: E402

SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,100M"
REPEATS = 5  # of the import and init sections

DESCRIPTION = """\
Compare Horovod's allreduce with torch.distributed's Gloo and with Open MPI on this machine.

Horovod meets each of them alone: beside MPI, Gloo takes several times as long. The two run in the
same processes and take turns of a few calls (--turn) on the same rotating buffers, each call after
a common barrier; OMP_NUM_THREADS is 1. A sample is the time of the slowest rank, a result the
median of the samples. Ratios say how many times as long as ours a contender takes: 2.00x means that
we are twice as fast.
"""
EPILOG = """\
examples:
  python benchmarks/collectives.py                     2 and 4 ranks, 4 B to 100 MiB, a few minutes
  python benchmarks/collectives.py --np 2 --sizes 64K,1M --seconds 5
  python benchmarks/collectives.py --np 2 --check      for scripts: exit status 1 when a promise
                                                       is missed (they are about 2 ranks)

Close other programs first: numbers of a busy machine mean little. Open MPI and mpi4py come with
`pip install horovod[bench]`; without them their column is left out.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--np", type=ranks, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks (2 4)"
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=sizes(SIZES),
        metavar="LIST",
        help=f"bytes, with K and M for KiB and MiB ({SIZES})",
    )
    parser.add_argument(
        "--turn",
        type=int,
        default=10,
        metavar="N",
        help="calls of one contender before the next is due (10); 1 finds all code and data cold",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=3.0,
        metavar="S",
        help="time spent on each size (3); more gives steadier medians",
    )
    parser.add_argument("--no-mpi", action="store_true", help="leave Open MPI out")
    parser.add_argument(
        "--only-allreduce", action="store_true", help="skip the import and init sections"
    )
    add_options(parser, "collectives")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=900.0,
        metavar="S",
        help="give up on one number of ranks after this long (900)",
    )
    return parser.parse_args(arguments)


def sizes(text: str) -> list[int]:
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)([KM]?)", item.strip(), re.IGNORECASE)
        number = int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2].upper()] if match else 0
        if number < 4 or number % 4:
            raise argparse.ArgumentTypeError(
                f"{item.strip()!r} is not a size: use multiples of 4 bytes such as 64, 16K or 100M"
            )
        found.append(number)
    return sorted(set(found))


def ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a collective needs at least 2 ranks")
    return int(text)


# -- starting ranks ----------------------------------------------------------------------------


def find_mpirun() -> tuple[str | None, str]:
    """Open MPI's mpirun, or None and the reason."""
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py is not installed"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        return None, "there is no mpirun"
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout:
        return None, f"{mpirun} is not Open MPI's"
    return mpirun, ""


def race(
    size: int,
    rival: str,
    options: argparse.Namespace,
    mpirun: str | None,
    advance: Callable[[str], None],
) -> Duel:
    """Horovod and a rival on `size` ranks; `mpirun` starts them if it is Open MPI."""
    with tempfile.TemporaryDirectory(prefix="horovod-benchmark-") as folder:
        plan = {
            "np": size,
            "rival": rival,
            "barrier": f"{folder}/barrier",
            "sizes": options.sizes,
            "seconds": options.seconds,
            "turn": options.turn,
            "rendezvous": f"{folder}/rendezvous",
            "result": f"{folder}/result.json",
        }
        program = [sys.executable, str(ROOT / "benchmarks" / "collectives_rank.py")]
        program.append(json.dumps(plan))
        if rival != "mpi" or mpirun is None:
            commands = [(program, environ) for environ in torchrun_environments(size)]
        else:
            flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            commands = [([mpirun, "-np", str(size), *flags, *program], environment())]
        follow(commands, Path(folder, "collectives"), options.timeout, advance)
        found = json.loads(Path(plan["result"]).read_text())
    return Duel({int(n): samples for n, samples in found["allreduce"].items()}, found["many"])


# -- the cost of starting ----------------------------------------------------------------------

IMPORT = """
import time, torch
begin = time.perf_counter()
import horovod.torch
print(time.perf_counter() - begin)
"""
INIT = """
import sys, time, torch
print("ready", flush=True)
sys.stdin.readline()
begin = time.perf_counter()
import horovod.torch as hvd
hvd.init()
print(time.perf_counter() - begin, flush=True)
hvd.shutdown()
"""


def import_cost() -> list[float]:
    """Milliseconds that `import horovod.torch` takes after `import torch`, from byte code.

    An installed package comes with byte code. A checkout may have none, nor be allowed to keep it,
    so it is kept aside, and the first import, which compiles, does not count.
    """
    samples = []
    with tempfile.TemporaryDirectory(prefix="horovod-benchmark-") as folder:
        environ = environment(PYTHONPYCACHEPREFIX=folder)
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(REPEATS + 1):
            command = [sys.executable, "-c", IMPORT]
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
            samples.append(1000 * float(done.stdout))
    print(f"import horovod.torch from source, once: {samples[0]:.0f} ms")
    return samples[1:]


def init_cost() -> list[float]:
    """Milliseconds from `import torch` done to `hvd.init()` done, on the slower of two ranks."""
    samples = []
    for _ in range(REPEATS):
        commands = [([sys.executable, "-c", INIT], e) for e in torchrun_environments(2)]
        pipe = subprocess.PIPE
        with processes(commands, stdin=pipe, stdout=pipe) as running:
            for process in running:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    sys.exit("A rank of the init section failed before hvd.init(); see above.")
            for process in running:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            answers = [process.communicate(timeout=120)[0] for process in running]
        if not all(answers):
            sys.exit("hvd.init() failed on two local ranks; see above.")
        samples.append(1000 * max(float(answer) for answer in answers))
    return samples


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    mpirun, reason = (None, "--no-mpi was given") if options.no_mpi else find_mpirun()
    if mpirun is None:
        print(f"Open MPI is left out: {reason}.")
    rivals = ["gloo"] if mpirun is None else ["gloo", "mpi"]
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    progress = Progress(
        len(options.np) * len(rivals) * (len(options.sizes) + 1)
        + (0 if options.only_allreduce else 2)
    )
    results = Results()
    for size in options.np:
        results.runs.append(Run(size))
        for rival in rivals:
            title = f"{size} ranks, {LABELS[rival]}"
            progress.show(title)

            def advance(what: str, title: str = title) -> None:
                label = human(int(what)) if what.isdigit() else "1,000 small"
                progress.advance(f"{title}, {label}")

            results.runs[-1].duels[rival] = race(size, rival, options, mpirun, advance)
        progress.clear()
        print(f"\n{table(results.runs[-1])}\n", flush=True)
    if not options.only_allreduce:
        progress.show("import")
        results.import_ms = import_cost()
        progress.advance("init")
        results.init_ms = init_cost()
        progress.advance("done")
    progress.clear()

    write_files(
        "collectives",
        options.output,
        lambda path: write_csv(results, path),
        lambda path: write_plot(results, path),
    )
    met = all_met(requirements(results))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
