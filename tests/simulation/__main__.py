"""Runs simulated jobs: see the package's docstring.

Exit status 1 if a promise was broken, or if a mutant survived.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

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


def _fingerprint(plan: Plan) -> str:
    return simulate(plan).fingerprint()


def _print_digest(plans: list[Plan], processes: int) -> None:
    """Print a digest of the events of all jobs, which is the same on every machine."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        found = pool.map(_fingerprint, plans, chunksize=1)
    digest = hashlib.sha256(" ".join(found).encode()).hexdigest()[:16]
    print(f"{digest}  {len(plans)} jobs, Python {platform.python_version()}, {platform.machine()}")


def _cpu_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def _plans_for(mutant: Mutant, seeds: range) -> Iterator[Plan]:
    """Yield the job that was made for a mutant, with some orders of threads, then jobs of seeds."""
    # Here, because pytest need not be there for anything else.
    from tests.simulation import test_fixed_ranks, test_simulation

    yield from test_simulation.plans_for(mutant.name)
    own = test_fixed_ranks.FOUND.get(mutant.name)
    if own is not None:
        yield from (replace(own, seed=seed) for seed in range(own.seed, own.seed + 10))
    kind = FixedPlan if mutant in FIXED_MUTANTS else Plan
    yield from map(kind.from_seed, seeds)


def _hunt(task: tuple[Mutant, range, float]) -> str:
    """Say at which seed, after how many jobs and seconds, a mutant breaks a promise."""
    mutant, seeds, limit = task
    begun = time.process_time()
    for number, plan in enumerate(_plans_for(mutant, seeds), 1):
        problem = simulate(plan, mutant.patches).problem
        seconds = time.process_time() - begun
        if problem:
            found = f"{number} jobs, {seconds:.0f} s, seed {plan.seed}"
            return f"{mutant.name}: {found}: {problem[:100]}"
        if seconds > limit:
            break
    return f"{mutant.name}: SURVIVED {number} jobs, {seconds:.0f} s"


def _results(plans: list[Plan], processes: int) -> Iterator[Result]:
    if len(plans) == 1 or processes == 1:
        yield from map(_run, plans)
        return
    yield _run(plans[0])  # here: the processes that run the others have its modules then
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(_run, plans[1:], chunksize=4)


def _simulate(plans: list[Plan], processes: int) -> int:
    begun, broken, coverage = time.monotonic(), [], Coverage()
    cpu_before = _cpu_seconds()
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
    print(f"{(_cpu_seconds() - cpu_before) / coverage.jobs:.2f} s of a core for each job")
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
    parser.add_argument("--hosts", type=int, default=0, help="of each elastic job (drawn)")
    parser.add_argument("--slots", type=int, default=0, help="of each host (drawn)")
    parser.add_argument("--faults", type=int, default=-1, help="in each elastic job (drawn)")
    parser.add_argument("--story", action="store_true", help="tell everything that happened")
    parser.add_argument("--digest", action="store_true", help="print only a digest of all events")
    parser.add_argument("--mutants", action="store_true", help="try the mistakes of mutants.py")
    parser.add_argument("--minutes", type=float, default=20.0, help="CPU time for each mutant")
    parser.add_argument("--only", default="", help="a part of the names of mutants to try")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    import torch  # here, because it takes longer than to say that an argument is wrong

    torch.set_num_threads(1)
    if args.mutants:
        return _try_mutants(args.seeds, args.processes, args.minutes, args.only)
    kind = FixedPlan if args.fixed else Plan
    plans = [kind.from_seed(seed, args.hosts, args.faults, args.slots) for seed in args.seeds]
    if args.digest:
        _print_digest(plans, args.processes)
        return 0
    if args.story:
        for plan in plans:
            print(simulate(plan).story(most=1 << 30))
        return 0
    return _simulate(plans, args.processes)


if __name__ == "__main__":
    sys.exit(main())
