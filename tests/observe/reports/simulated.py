"""Jobs with a known fault, as their ranks would have recorded them: what advice is tested on.

A simulated job has what recorded ones had, on a machine with two cores that had nothing else to do
(two ranks, real-time priority, a model of three layers), at 5, 50, 90 and 99 % of the steps:

| milliseconds | recorded | simulated at that size |
|---|---|---|
| step | 6.5, 7.2, 8.2, 10.0 | 6.4, 7.1, 8.2, 10.9 |
| until the first gradient | 2.9, 3.3, 3.6, 6.1 | 2.9, 3.3, 3.8, 6.6 |
| backward | 2.6, 2.9, 3.3, 3.9 | 2.6, 2.9, 3.3, 4.1 |
| wait | 0, 0, 0.2, 2.3 | 0, 0, 0.4, 2.6 |
| negotiation | 0.05, 0.08, 0.12, 0.15 | 0.06, 0.09, 0.13, 0.17 |
| reduction | 0.56, 0.64, 0.74, 0.91 | 0.55, 0.64, 0.73, 0.89 |

Beyond what was recorded, ranks differ a little for the whole job, drift for some steps, and lose
time to other programs now and then, by a distribution with a heavy tail: a finding must survive
that. `tests/observe/reports/faults.py` makes the faults.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from horovod.observe.timeline.recording import RecordedCollective, Recording, TimeSpan

BUCKET = "allreduce.DistributedOptimizer.0.bucket 1 of 1 (b to a)"
OPTIMIZER = "DistributedOptimizer.0"


@dataclass
class SimulatedJob:
    """Times in microseconds. What is not set is what a healthy job has."""

    seed: int
    ranks: int
    steps: int = 80
    scale: float = 1.0  # of computing: 1 is that of the recorded job
    exchange_scale: float = 1.0
    before: float = 3280.0  # until the first gradient: update, data, forward
    backward: float = 2900.0
    reduction: float = 640.0
    negotiation: float = 80.0
    nbytes: int = 1_680_000
    operations: int = 1  # of the bucket
    tensors: tuple[str, ...] = ("b", "a")  # in the bucket
    calls: int = 0  # collectives of the program's own in each step, in place of the optimizer's
    hosts: int = 1
    transport: str = "SHM"
    on_devices: bool = False  # each rank's begins to reduce by itself, and waits in that for others
    kernel_tells: bool = True  # for how long ranks ran and were starved
    cores: int | None = None  # of each host; by default one for each rank, and one more
    fusion_threshold: int = 128 << 20
    variation: float = 0.0  # of the work of a step, by which ranks differ
    slow_input: dict[int, float] = field(default_factory=dict)  # time that ranks wait for data
    slow_loading: float = 0.0  # time that all ranks compute for data
    slow_backward: dict[int, float] = field(default_factory=dict)
    pauses: dict[int, dict[int, float]] = field(default_factory=dict)  # by step, then rank
    disturbed: float = 0.02  # how often something else takes the time of a phase of a rank
    starving: float = 0.0  # the share of computing that ranks wait for a core, on average

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed} {self.ranks}")
        self._offsets = [self._random.gauss(0, 0.006) for _ in range(self.ranks)]
        self._drifts = [0.0] * self.ranks

    def recordings(self) -> list[Recording]:
        """What the ranks' files say, as `read_recordings` returns it."""
        self._ends = [10_000.0 + self._random.uniform(0, 500) for _ in range(self.ranks)]
        self._made = [self._empty(rank) for rank in range(self.ranks)]
        for number in range(2, self.steps + 2):
            if self.calls:
                self._step_of_calls(number)
            else:
                self._step(number)
        for made, end in zip(self._made, self._ends, strict=True):
            made.ended = end
        return self._made

    def _empty(self, rank: int) -> Recording:
        per_host = math.ceil(self.ranks / self.hosts)
        cores = per_host + 1 if self.cores is None else self.cores
        return Recording(
            path=f"t.rank{rank}.json",
            rank=rank,
            host=f"host{rank // per_host}",
            started=0,
            clock=0,
            size=self.ranks,
            version=2,
            cores=frozenset(range(cores)),
            fusion_threshold=self.fusion_threshold,
        )

    # -- one step ----------------------------------------------------------------------------

    def _step(self, number: int) -> None:
        chance = self._random
        common = math.exp(chance.gauss(0, 0.07))
        starts, ready, about = list(self._ends), [], []
        for rank in range(self.ranks):
            before, backward, ran, starved = self._compute(number, rank, common)
            ready.append(starts[rank] + before + backward)
            about.append((before, backward, ran, starved))
        agreed = self._exchange(number, ready, self.reduction, self.nbytes)
        for rank, made in enumerate(self._made):
            before, backward, ran, starved = about[rank]
            exchanging = self._ends[rank] - agreed
            lost = exchanging * self._starving() / 2
            made.waits.append(TimeSpan(ready[rank], self._ends[rank], what=BUCKET))
            first = starts[rank] + before
            span = TimeSpan(first, first + backward, number)
            made.backwards.setdefault(OPTIMIZER, []).append(span)
            busy = ran + exchanging - lost
            step = TimeSpan(
                starts[rank], self._ends[rank], number, ran=busy, starved=starved + lost
            )
            made.steps.setdefault(OPTIMIZER, []).append(step)

    def _compute(self, number: int, rank: int, common: float) -> tuple[float, float, float, float]:
        """How long it takes to the first gradient and from there on, and what the kernel counts."""
        chance = self._random
        self._drifts[rank] = 0.9 * self._drifts[rank] + chance.gauss(0, 0.005)
        speed = 1 + self._offsets[rank] + self._drifts[rank]
        work = self.scale * common * speed * math.exp(chance.gauss(0, self.variation))
        before = (self.before + self.slow_loading) * work * math.exp(chance.gauss(0, 0.03))
        backward = self.backward * work * math.exp(chance.gauss(0, 0.04))
        ran = before + backward
        blocked = self.slow_input.get(rank, 0.0) * math.exp(chance.gauss(0, 0.15))
        blocked += self.pauses.get(number, {}).get(rank, 0.0)
        late = self.slow_backward.get(rank, 0.0) * math.exp(chance.gauss(0, 0.1))
        ran += late
        # Another program has the core for a while, or the kernel has something to do.
        noise = [self._disturbance(), self._disturbance()]
        starved = [share * self._starving() for share in (before, backward + late)]
        if chance.random() < 0.5:
            starved[0] += noise[0]
            starved[1] += noise[1]
        else:
            ran += sum(noise)
            before, backward = before + noise[0], backward + noise[1]
        if number in (5, 9, 17, 33, 65):  # the heap is put on huge pages
            before += 200_000.0 if number == 5 else 3000.0
            ran += 200_000.0 if number == 5 else 3000.0
        total = sum(starved)
        return before + blocked + starved[0], backward + late + starved[1], ran, total

    def _disturbance(self) -> float:
        if self._random.random() >= self.disturbed:
            return 0.0
        return min(400.0 * self._random.paretovariate(0.8), self.scale * self.before)

    def _starving(self) -> float:
        return self.starving * self._random.expovariate(1) if self.starving else 0.0

    def _exchange(
        self, number: int, ready: list[float], reduction: float, nbytes: int, name: str = BUCKET
    ) -> float:
        """Agree when the last is ready, and reduce: when that began. Records it."""
        chance = self._random
        agreed = max(ready) + self.negotiation * math.exp(chance.gauss(0, 0.3))
        lasted = reduction * self.exchange_scale * math.exp(chance.gauss(0, 0.09))
        if chance.random() < 0.02:
            lasted += 150.0 * chance.paretovariate(1.5)
        ended = agreed + lasted
        for rank, made in enumerate(self._made):
            mine = agreed + chance.uniform(0, 15)
            done = ended + chance.uniform(0, 15)
            width = (done - mine) / self.operations
            label = f"{self.transport}_ALLREDUCE"
            phases = [
                TimeSpan(mine + index * width, mine + (index + 1) * width - 0.5, what=label)
                for index in range(self.operations)
            ]
            key = (0, number, name)
            if self.on_devices:
                key, mine = (-1, number, name), ready[rank]
                phases = [TimeSpan(mine, done, what=label)]
            about = {"bytes": nbytes, "count": self.operations, "names": list(self.tensors)}
            each = RecordedCollective(name, "ALLREDUCE", key, ready[rank], mine, mine, done, phases)
            each.about = about
            made.collectives.append(each)
            self._ends[rank] = done
        return agreed

    def _step_of_calls(self, number: int) -> None:
        """A program that reduces one tensor after the other, and waits for each."""
        common = math.exp(self._random.gauss(0, 0.07))
        times = [self._compute(number, rank, common) for rank in range(self.ranks)]
        left = [time[0] + time[1] for time in times]
        for call in range(self.calls):
            ready = [
                end + (left[rank] if call == 0 else 60.0 * math.exp(self._random.gauss(0, 0.5)))
                for rank, end in enumerate(self._ends)
            ]
            name = f"allreduce.gradient.{call}"
            self._exchange(number, ready, 150.0, self.nbytes // self.calls, name)
            for rank, made in enumerate(self._made):
                made.waits.append(TimeSpan(ready[rank], self._ends[rank], what=name))
