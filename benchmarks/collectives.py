#!/usr/bin/env python
"""How fast a collective is: Horovod against torch.distributed (Gloo or NCCL) and Open MPI.

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
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.collectives_report import (  # noqa: E402
    LABELS,
    SMALL,
    Duel,
    Results,
    Run,
    human,
    microseconds,
    requirements,
    table,
    write_csv,
    write_plot,
)
from benchmarks.gpus import Gpus, add_mps_option, gpus_for  # noqa: E402
from benchmarks.named_hosts import add_hosts_option, host_counts  # noqa: E402
from benchmarks.parts import Parts, add_limit_option  # noqa: E402
from benchmarks.processes import (  # noqa: E402
    Commands,
    Progress,
    environment,
    follow,
    positive,
    processes,
    torchrun_environments,
)
from benchmarks.promises import (  # noqa: E402
    add_options,
    all_met,
    times_text,
    warn_if_busy,
    write_files,
)

SIZES = {"cpu": "4,64,1K,4K,16K,64K,256K,1M,4M,16M,100M", "cuda": "4,1M,100M"}
TIMEOUT = {"cpu": 900.0, "cuda": 150.0}
REPEATS = 5  # of the import and init sections

DESCRIPTION = """\
Compare Horovod's allreduce with torch.distributed's Gloo and with Open MPI on this machine, or with
torch.distributed's NCCL on its GPUs.

Horovod meets each of them alone: beside MPI, Gloo takes several times as long. The two run in the
same processes and take turns of a few calls (--turn) on the same rotating buffers, each call after
a common barrier; OMP_NUM_THREADS is 1. A sample is the time of the slowest rank, a result the
median of the samples. Ratios say how many times as long as ours a contender takes: 2.00x means that
we are twice as fast.

On cuda each call is followed by torch.cuda.synchronize() within its time. With fewer GPUs than
ranks, ranks share them: each gets a NCCL_HOSTID of its own, so that NCCL joins them over sockets,
for both contenders; and MPS is started, which lets their kernels run side by side.
"""
EPILOG = """\
examples:
  python benchmarks/collectives.py                     2 and 4 ranks, 4 B to 100 MiB, a few minutes
  python benchmarks/collectives.py --np 2 --sizes 64K,1M --seconds 5
  python benchmarks/collectives.py --np 2 --check      for scripts: exit status 1 when a promise
                                                       is missed (they are about 2 ranks)
  python benchmarks/collectives.py --device cuda --np 2 --hosts one --limit 120

Close other programs first: numbers of a busy machine mean little. Open MPI and mpi4py come with
`pip install -e '.[bench]'`; without them their column is left out.
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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(cpu)")
    add_hosts_option(parser)
    parser.add_argument(
        "--sizes",
        type=sizes,
        metavar="LIST",
        help=f"bytes, with K and M for KiB and MiB ({SIZES['cpu']}; on cuda {SIZES['cuda']})",
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
    parser.add_argument("--no-many", action="store_true", help="leave the 1,000 small tensors out")
    parser.add_argument(
        "--only-allreduce",
        action="store_true",
        help="skip the import and init sections, which are about CPUs only",
    )
    add_mps_option(parser)
    add_options(parser, "collectives")
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="S",
        help="give up on one number of ranks after this long (900; on cuda 150)",
    )
    add_limit_option(parser)
    options = parser.parse_args(arguments)
    options.sizes = options.sizes or sizes(SIZES[options.device])
    options.timeout = options.timeout or TIMEOUT[options.device]
    return options


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


def commands_of(
    run: Run, rival: str, program: list[str], mpirun: str | None, gpus: Gpus
) -> Commands:
    """One for each rank, or that of mpirun, which starts them if the rival is Open MPI."""
    if rival == "mpi" and mpirun is not None:
        flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return [([mpirun, "-np", str(run.size), *flags, *program], environment())]
    environments = torchrun_environments(run.size, run.size // run.hosts)
    return [
        (program, {**environ, **gpus.variables(rank, run.size)})
        for rank, environ in enumerate(environments)
    ]


class Bench:
    """Races Horovod against its rivals, run by run."""

    def __init__(
        self, options: argparse.Namespace, rivals: list[str], mpirun: str | None, gpus: Gpus
    ) -> None:
        self.parts = Parts(options.timeout, options.limit)
        self._options = options
        self._rivals = rivals
        self._mpirun = mpirun
        self._gpus = gpus
        parts = len(options.sizes) + (not options.no_many)
        runs = sum(len(host_counts(options, size)) for size in options.np)
        more = 0 if options.only_allreduce or gpus.count else 2
        self.progress = Progress(runs * len(rivals) * parts + more)

    def measure(self, size: int, hosts: int) -> Run:
        """One number of ranks against each of the rivals, as far as they get."""
        run = Run(size, hosts=hosts, gpu=self._gpus.name)
        try:
            for rival in self._rivals:
                if rival == "mpi" and hosts > 1:
                    continue  # mpirun says which ranks share a host
                self.progress.show(f"{run.title}, {LABELS[rival]}")
                run.duels[rival] = self._race(run, rival)
        finally:  # also when we are told to end
            self.progress.clear()
            if not run.is_empty:
                print(f"\n{table(run)}\n", flush=True)
        return run

    def _race(self, run: Run, rival: str) -> Duel:
        with tempfile.TemporaryDirectory(prefix="horovod-benchmark-") as folder:
            options, result = self._options, Path(folder, "result.json")
            plan = {
                "np": run.size,
                "rival": rival,
                "device": options.device,
                "barrier": f"{folder}/barrier",
                "sizes": options.sizes,
                "seconds": options.seconds,
                "turn": options.turn,
                "many": not options.no_many,
                "rendezvous": f"{folder}/rendezvous",
                "result": str(result),
            }
            program = [sys.executable, str(ROOT / "benchmarks" / "collectives_rank.py")]
            program.append(json.dumps(plan))
            commands = commands_of(run, rival, program, self._mpirun, self._gpus)
            title = f"{run.title}, {LABELS[rival]}"

            def advance(what: str) -> None:
                label = human(int(what)) if what.isdigit() else SMALL
                self.progress.advance(f"{title}, {label}")
                if self._gpus.count:
                    print(f"{title}, {label}: {newest(result, rival)}", flush=True)

            self.parts.attempt(
                title,
                lambda seconds: follow(commands, Path(folder, "collectives"), seconds, advance),
            )
            return read_duel(result)


def read_duel(result: Path) -> Duel:
    """What the ranks have found until now."""
    if not result.exists():
        return Duel({}, {})
    found = json.loads(result.read_text())
    return Duel({int(n): samples for n, samples in found["allreduce"].items()}, found["many"])


def newest(result: Path, rival: str) -> str:
    """The last that they found, for people."""
    duel = read_duel(result)
    samples = duel.many or list(duel.allreduce.values())[-1]
    ours, theirs = median(samples["ours"]), median(samples[rival])
    told = f"{LABELS['ours']} {microseconds(ours)}, {LABELS[rival]} {microseconds(theirs)}"
    return f"{told} microseconds ({times_text(theirs / ours)})"


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
    on_cpu = options.device == "cpu"
    mpirun, reason = (None, "--no-mpi was given") if options.no_mpi else find_mpirun()
    if mpirun is None and on_cpu:
        print(f"Open MPI is left out: {reason}.")
    rivals = ["nccl"] if not on_cpu else ["gloo"] if mpirun is None else ["gloo", "mpi"]
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    results = Results()
    with gpus_for(options.device, max(options.np), not options.no_mps) as gpus:
        bench = Bench(options, rivals, mpirun, gpus)
        for size in options.np:
            for hosts in host_counts(options, size):
                run = bench.measure(size, hosts)
                if not run.is_empty:
                    results.runs.append(run)
    if on_cpu and not options.only_allreduce:
        bench.progress.show("import")
        results.import_ms = import_cost()
        bench.progress.advance("init")
        results.init_ms = init_cost()
        bench.progress.advance("done")
    bench.progress.clear()

    if results.runs:
        write_files(
            "collectives",
            options.output,
            lambda path: write_csv(results, path),
            lambda path: write_plot(results, path),
        )
    met = all_met(requirements(results, options.device))
    bench.parts.explain()
    return 1 if bench.parts.missing or (options.check and not met) else 0


if __name__ == "__main__":
    sys.exit(main())
