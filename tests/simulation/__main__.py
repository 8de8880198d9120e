"""Runs simulated jobs: see the package's docstring.

Exit status 1 if a promise was broken, or if a mutant survived.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator

from tests.simulation.coverage import Coverage
from tests.simulation.fixed_mutants import FIXED_MUTANTS
from tests.simulation.fixed_plan import FixedPlan
from tests.simulation.job import shortest, simulate
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.plan import Plan, Result


def _seeds(text: str) -> range:
    """Return the numbers of "17" or "0-999"."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a range such as 0-999")
    first = int(found[1])
    return range(first, int(found[2] or first) + 1)


def _run(plan: Plan) -> Result:
    """Run a job, and leave out its events: they do not need to travel between processes."""
    result = simulate(plan)
    result.events = []
    return result


def _hunt(task: tuple[Mutant, range, float]) -> str:
    """Say at which seed, after how many jobs and seconds, a mutant breaks a promise."""
    mutant, seeds, limit = task
    begun = time.process_time()
    kind = FixedPlan if mutant in FIXED_MUTANTS else Plan
    for number, seed in enumerate(seeds, 1):
        problem = simulate(kind.from_seed(seed), mutant.patches).problem
        seconds = time.process_time() - begun
        if problem:
            return f"{mutant.name}: {number} jobs, {seconds:.0f} s, seed {seed}: {problem[:100]}"
        if seconds > limit:
            break
    return f"{mutant.name}: SURVIVED {number} jobs, {seconds:.0f} s"


def _results(plans: list[Plan], processes: int) -> Iterator[Result]:
    if len(plans) == 1 or processes == 1:
        yield from map(_run, plans)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(_run, plans, chunksize=4)


def _simulate(plans: list[Plan], processes: int) -> int:
    begun, broken, coverage = time.monotonic(), [], Coverage()
    for number, result in enumerate(_results(plans, processes), 1):
        coverage.add(result)
        if result.problem:
            broken.append(result.plan)
            print(f"seed {result.plan.seed}: {result.problem[:1000]}", flush=True)
        if sys.stderr.isatty():
            days = coverage.seconds / 86400
            sys.stderr.write(
                f"\r{number} of {len(plans)} jobs, {days:.1f} virtual days, {len(broken)} broken "
            )
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    print("\n".join(coverage.report((time.monotonic() - begun) / 60)))
    if broken:
        print("\nthe shortest version of the first that broke a promise:\n")
        print(shortest(min(broken, key=lambda plan: plan.seed)).story())
    return int(bool(broken))


def _try_mutants(seeds: range, processes: int, minutes: float, chosen: str) -> int:
    tasks = [
        (mutant, seeds, 60 * minutes)
        for mutant in (*MUTANTS, *FIXED_MUTANTS)
        if chosen in mutant.name
    ]
    survivors = 0
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for line in pool.imap(_hunt, tasks, chunksize=1):
            survivors += ": SURVIVED" in line
            print(line, flush=True)
    print(f"{len(tasks) - survivors} of {len(tasks)} mutants found")
    return int(survivors > 0)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(1000), help="17, or 0-999")
    parser.add_argument("--fixed", action="store_true", help="jobs with fixed ranks")
    parser.add_argument("--story", action="store_true", help="tell everything that happened")
    parser.add_argument("--mutants", action="store_true", help="try the mistakes of mutants.py")
    parser.add_argument("--minutes", type=float, default=20.0, help="CPU time for each mutant")
    parser.add_argument("--only", default="", help="a part of the names of mutants to try")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    import torch  # here, because it takes longer than to say that an argument is wrong

    torch.set_num_threads(1)
    if args.mutants:
        return _try_mutants(args.seeds, args.processes, args.minutes, args.only)
    plans = [(FixedPlan if args.fixed else Plan).from_seed(seed) for seed in args.seeds]
    if args.story:
        for plan in plans:
            print(simulate(plan).story(most=1 << 30))
        return 0
    return _simulate(plans, args.processes)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of what a seed decides
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
