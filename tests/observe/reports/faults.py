"""Simulated jobs with a fault, and what the report should say first about each.

`test_faults.py` holds the report to it. ``python -m tests.observe.reports.faults 100`` prints how
often it is right, with 100 jobs of each kind and size: the table of docs/timeline.md.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from horovod.observe.reports.advice import advise
from horovod.observe.reports.analysis import analyse
from horovod.observe.reports.losses import Advice, Fault
from tests.observe.reports.simulated import SimulatedJob

SIZES = (2, 4, 8)


@dataclass(frozen=True)
class Expected:
    """What the first advice must be."""

    fault: Fault | None  # none at all
    words: str = ""  # a pattern that its sentences must have

    def holds(self, advice: list[Advice]) -> bool:
        if self.fault is None or not advice:
            return self.fault is None and not advice
        first = advice[0]
        text = f"{first.subject} {first.number} {first.action}"
        return first.fault is self.fault and re.search(self.words, text) is not None


Made = tuple[SimulatedJob, Expected]


def _job(seed: int, ranks: int, name: str) -> tuple[SimulatedJob, random.Random, float]:
    """A healthy job of some size, dice for the fault, and how long it computes in a step."""
    dice = random.Random(f"{name} {seed} {ranks}")
    job = SimulatedJob(seed, ranks, steps=dice.randint(40, 60))
    job.disturbed, job.starving = dice.uniform(0.01, 0.04), dice.uniform(0, 0.025)
    job.scale = 10 ** dice.uniform(0, 1.4)  # steps of 7 to 160 ms
    job.exchange_scale = job.scale * dice.uniform(0.5, 1.2)
    job.nbytes = round(job.nbytes * job.exchange_scale)
    return job, dice, job.scale * (job.before + job.backward)


def healthy(seed: int, ranks: int) -> Made:
    job, _, _ = _job(seed, ranks, "healthy")
    return job, Expected(None)


def healthy_with_few_layers(seed: int, ranks: int) -> Made:
    """The first gradient comes when most of backward is over, and the update takes long."""
    job, dice, _ = _job(seed, ranks, "shallow")
    job.slow_loading = job.backward * dice.uniform(4, 8)
    job.tensors = tuple(f"layer{number}.weight" for number in range(dice.randrange(1, 9)))
    return job, Expected(None)


def healthy_on_two_hosts(seed: int, ranks: int) -> Made:
    """1 Gbit/s and more, mostly hidden by computing that takes long."""
    job, dice, compute = _job(seed, ranks, "hosts")
    job.hosts, job.transport, job.exchange_scale = 2, "TCP", 1.0
    job.reduction = compute * dice.uniform(0.03, 0.1)
    job.nbytes = round(job.reduction * dice.uniform(90, 900))
    return job, Expected(None)


def healthy_without_the_kernel(seed: int, ranks: int) -> Made:
    """Nothing tells why a rank was late."""
    job, _, _ = _job(seed, ranks, "untold")
    job.kernel_tells, job.starving = False, 0.0
    return job, Expected(None)


def healthy_on_devices(seed: int, ranks: int) -> Made:
    job, _, _ = _job(seed, ranks, "devices")
    job.on_devices, job.transport, job.starving = True, "NCCL", 0.0
    job.before = job.backward / 2
    return job, Expected(None)


def slow_device(seed: int, ranks: int) -> Made:
    job, _ = healthy_on_devices(seed, ranks)
    dice = random.Random(f"device {seed} {ranks}")
    rank = dice.randrange(ranks)
    work = job.scale * (job.before + job.backward)
    job.slow_backward = {rank: work * dice.uniform(0.08, 1.0)}
    return job, Expected(Fault.SLOW_RANKS, rf"^rank {rank} is slow.*Backward takes")


def slow_input_on_one_rank(seed: int, ranks: int) -> Made:
    job, dice, compute = _job(seed, ranks, "input")
    rank = dice.randrange(ranks)
    job.slow_input = {rank: compute * dice.uniform(0.08, 1.5)}
    return job, Expected(Fault.SLOW_RANKS, rf"^rank {rank} is slow.*data loading there first")


def slow_input_on_all_ranks(seed: int, ranks: int) -> Made:
    job, dice, compute = _job(seed, ranks, "all")
    job.slow_input = dict.fromkeys(range(ranks), compute * dice.uniform(0.2, 3))
    return job, Expected(Fault.INPUT, "all ranks wait for input")


def input_computed_on_all_ranks(seed: int, ranks: int) -> Made:
    """Samples are decoded by the training process itself."""
    job, dice, _ = _job(seed, ranks, "loading")
    job.slow_loading = job.backward * dice.uniform(4, 15)
    job.tensors = tuple(f"layer{number}.weight" for number in range(dice.randrange(16, 200)))
    return job, Expected(Fault.INPUT, "input takes long on all ranks")


def slow_backward_on_one_rank(seed: int, ranks: int) -> Made:
    job, dice, compute = _job(seed, ranks, "backward")
    rank = dice.randrange(ranks)
    job.slow_backward = {rank: compute * dice.uniform(0.08, 1.0)}
    return job, Expected(Fault.SLOW_RANKS, rf"^rank {rank} is slow.*Backward takes")


def slow_host(seed: int, ranks: int) -> Made:
    """All ranks of the second of two hosts."""
    job, dice, compute = _job(seed, ranks, "host")
    job.hosts, job.transport, job.reduction = 2, "TCP", 640.0
    slow = range(ranks // 2, ranks)
    job.slow_backward = dict.fromkeys(slow, compute * dice.uniform(0.12, 1.0))
    return job, Expected(Fault.SLOW_RANKS, rf"^ranks? {slow[0]}\b.*host host1")


def pauses_of_one_rank(seed: int, ranks: int) -> Made:
    job, dice, compute = _job(seed, ranks, "pause")
    rank, period = dice.randrange(ranks), dice.randint(6, job.steps // 4)
    pause = compute * dice.uniform(2.5, 40)
    job.pauses = {n: {rank: pause} for n in range(period, job.steps + 2, period)}
    words = rf"every {period}(st|nd|rd|th) step.*Rank {rank} (\(host \w+\) )?is the last"
    return job, Expected(Fault.LONG_STEPS, words)


def pauses_of_all_ranks(seed: int, ranks: int) -> Made:
    job, dice, compute = _job(seed, ranks, "evaluation")
    period, pause = dice.randint(6, job.steps // 4), compute * dice.uniform(2.5, 40)
    job.pauses = {
        n: {rank: pause * dice.uniform(0.9, 1.1) for rank in range(ranks)}
        for n in range(period, job.steps + 2, period)
    }
    return job, Expected(Fault.LONG_STEPS, rf"every {period}(st|nd|rd|th) step.*All ranks compute")


def slow_link(seed: int, ranks: int) -> Made:
    job, dice, compute = _job(seed, ranks, "link")
    job.hosts, job.transport, job.exchange_scale = 2, "TCP", 1.0
    job.reduction = compute * dice.uniform(0.2, 4)
    job.nbytes = max(1 << 19, round(job.reduction * dice.uniform(5, 45)))
    job.reduction = max(job.reduction, job.nbytes / 45)
    return job, Expected(Fault.NETWORK, "MB/s")


def many_small_calls(seed: int, ranks: int) -> Made:
    job, dice, _ = _job(seed, ranks, "calls")
    job.steps, job.calls, job.scale = 12, dice.randint(12, 24), 10 ** dice.uniform(0, 0.6)
    job.nbytes = job.calls * dice.randint(100, 4000)
    return job, Expected(Fault.SMALL_OPERATIONS, "hvd.grouped_allreduce")


def no_fusion(seed: int, ranks: int) -> Made:
    job, dice, _ = _job(seed, ranks, "fusion")
    job.operations, job.scale = dice.randint(20, 60), 10 ** dice.uniform(0, 0.4)
    job.fusion_threshold = dice.choice((0, 0, 1024))
    job.exchange_scale, job.reduction = 1.0, job.operations * dice.uniform(50, 150)
    job.nbytes = job.operations * dice.randint(100, 20_000)
    words = f"HOROVOD_FUSION_THRESHOLD is {job.fusion_threshold}"
    return job, Expected(Fault.SMALL_OPERATIONS, words)


def too_few_cores(seed: int, ranks: int) -> Made:
    job, dice, _ = _job(seed, ranks, "cores")
    job.cores = dice.randint(1, ranks - 1)
    job.starving = ranks / job.cores - 1
    words = rf"{ranks} ranks share {job.cores} core"
    return job, Expected(Fault.CORES, words)


def cores_taken_by_others(seed: int, ranks: int) -> Made:
    job, dice, _ = _job(seed, ranks, "busy")
    job.starving = dice.uniform(0.3, 1.5)
    return job, Expected(Fault.CORES, "busy with something else")


def uneven_batches(seed: int, ranks: int) -> Made:
    job, dice, _ = _job(seed, ranks, "uneven")
    job.variation = dice.uniform(0.3, 0.5)
    return job, Expected(Fault.TURNS, "equally long")


JOBS: Mapping[str, Callable[[int, int], Made]] = {
    "nothing is wrong": healthy,
    "nothing is wrong, few layers": healthy_with_few_layers,
    "nothing is wrong, two hosts": healthy_on_two_hosts,
    "nothing is wrong, and the kernel tells nothing": healthy_without_the_kernel,
    "nothing is wrong, GPUs": healthy_on_devices,
    "slow input on one rank": slow_input_on_one_rank,
    "slow backward on one rank": slow_backward_on_one_rank,
    "one slow GPU": slow_device,
    "one host of two is slow": slow_host,
    "slow input on all ranks": slow_input_on_all_ranks,
    "input decoded by the training process": input_computed_on_all_ranks,
    "one rank pauses periodically": pauses_of_one_rank,
    "all ranks pause periodically": pauses_of_all_ranks,
    "slow link between two hosts": slow_link,
    "many small collectives": many_small_calls,
    "no fusion": no_fusion,
    "more ranks than cores": too_few_cores,
    "other programs on the cores": cores_taken_by_others,
    "batches of uneven length": uneven_batches,
}


def advice_on(job: SimulatedJob) -> list[Advice]:
    return advise(analyse(job.recordings()))


def count_right(make: Callable[[int, int], Made], ranks: int, seeds: int) -> int:
    """In how many of these jobs the first advice is the fault."""
    made = [make(seed, ranks) for seed in range(seeds)]
    return sum(expected.holds(advice_on(job)) for job, expected in made)


def main(seeds: int) -> None:
    """Print a table for the docs."""
    print("| what is wrong | " + " | ".join(f"{ranks} ranks" for ranks in SIZES) + " |")
    print("|---|" + "---|" * len(SIZES))
    for name, make in JOBS.items():
        counts = [count_right(make, ranks, seeds) for ranks in SIZES]
        print(f"| {name} | " + " | ".join(f"{each} of {seeds}" for each in counts) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]))
