"""Runs simulated jobs: see the package's docstring.

Exit status 1 if a promise was broken, or if a mutant survived.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator

from tests.simulation.job import Plan, Result, shortest, simulate
from tests.simulation.mutants import MUTANTS, Mutant

_YEAR = 365.25 * 24 * 3600


def _seeds(text: str) -> range:
    """Return the numbers of "17" or "0-999"."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a range such as 0-999")
    first = int(found[1])
    return range(first, int(found[2] or first) + 1)


def _run(seed: int) -> Result:
    return _without_events(simulate(Plan.from_seed(seed)))


def _hunt(task: tuple[Mutant, range]) -> tuple[Mutant, int | None, str]:
    """Return the first seed at which a mutant breaks a promise."""
    mutant, seeds = task
    for seed in seeds:
        problem = simulate(Plan.from_seed(seed), mutant.patches).problem
        if problem:
            return mutant, seed, problem
    return mutant, None, ""


def _without_events(result: Result) -> Result:
    result.events = []  # they do not need to travel between processes
    return result


def _results(seeds: range, processes: int) -> Iterator[Result]:
    if len(seeds) == 1 or processes == 1:
        yield from map(_run, seeds)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(_run, seeds, chunksize=4)


def _simulate(seeds: range, processes: int) -> int:
    begun, virtual, broken = time.monotonic(), 0.0, []
    kinds: collections.Counter[str] = collections.Counter()
    endings: collections.Counter[str] = collections.Counter()
    generations = 0
    for number, result in enumerate(_results(seeds, processes), 1):
        virtual += result.seconds
        generations += result.generations
        kinds.update(fault.kind for fault in result.plan.faults)
        endings[result.ending or ("ended well" if result.status == 0 else "failed")] += 1
        if result.problem:
            broken.append(result.plan.seed)
            print(f"\nseed {result.plan.seed}: {result.problem}", flush=True)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{number} of {len(seeds)} jobs, {len(broken)} broken")
    minutes = (time.monotonic() - begun) / 60
    print(
        f"\n{len(seeds)} jobs in {minutes:.1f} min ({len(seeds) / minutes:.0f} a minute), "
        f"{virtual / _YEAR:.4f} virtual years, {generations} generations, "
        f"{sum(kinds.values())} faults"
    )
    for kind, count in kinds.most_common():
        print(f"  {count:6} {kind}")
    for ending, count in endings.most_common():
        print(f"  {count:6} jobs: {ending}")
    if broken:
        print("\nthe shortest version of the first that broke a promise:\n")
        print(shortest(Plan.from_seed(min(broken))).story())
    return int(bool(broken))


def _try_mutants(seeds: range, processes: int) -> int:
    survivors = 0
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        tasks = [(mutant, seeds) for mutant in MUTANTS]
        for mutant, seed, problem in pool.imap(_hunt, tasks):
            survivors += seed is None
            found = "SURVIVED" if seed is None else f"seed {seed}: {problem[:90]}"
            print(f"{mutant.name}: {found}", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants found")
    return int(survivors > 0)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(1000), help="17, or 0-999")
    parser.add_argument("--story", action="store_true", help="tell everything that happened")
    parser.add_argument("--mutants", action="store_true", help="try the mistakes of mutants.py")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.mutants:
        return _try_mutants(args.seeds, args.processes)
    if args.story:
        for seed in args.seeds:
            print(simulate(Plan.from_seed(seed)).story(most=1 << 30))
        return 0
    return _simulate(args.seeds, args.processes)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of what a seed decides
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
