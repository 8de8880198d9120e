"""A worker of a simulated job: the engine over TCP, `TorchState`, `ElasticSampler` and the loop.

The model is a chain of digests: a step makes of it a digest of itself, the step's number and what
the ranks reduced. So two ranks have the same model only if they took the same steps on the same
data. The state also carries the samples of the epoch that the model has seen; it goes back together
with the model.
"""

from __future__ import annotations

import time

import simulated  # what the simulation offers
import torch

from horovod.common.elastic import run_fn
from horovod.common.generations.membership import membership
from horovod.common.reduce_op import Max, ReduceOp, Sum
from horovod.elastic.worker import this_worker
from horovod.engine.collective import WORLD, Collective, Kind, Reduction
from horovod.engine.request import Request
from horovod.engine.runtime import runtime
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState


class State(TorchState):
    """A state that tells the simulation what was committed."""

    def sync(self) -> None:
        super().sync()
        simulated.received(self.step)

    def on_commit(self) -> None:
        super().on_commit()
        simulated.committed(self._version, self.step)
        writes = self._writer is not None and runtime.topology.rank == 0
        if writes and simulated.flip() and self._writer.flush():
            simulated.on_disk(self.step)


def init() -> None:
    """Enter a generation, and tell the simulation which."""
    runtime.init()
    member = membership()
    assert member is not None
    here = member.generation
    if here is not None:
        topology = here.topology
        simulated.formed(here.decision.number, here._prefix, topology)


def reset() -> None:
    """Leave a generation for the next one."""
    runtime.shutdown()
    init()


def reduce(name: str, value: float, op: ReduceOp = Sum, set_id: int = WORLD) -> Request:
    """Begin an allreduce of one number, in the background or not."""
    tensor = torch.tensor([value], dtype=torch.float64)
    collective = Collective(Kind.ALLREDUCE, name, set_id, Reduction(op))
    return runtime.submit(collective, [tensor], [tensor], background=simulated.flip())


def find_set(state: State) -> int | None:
    """Return the process set of the first two ranks: once made, later generations have it too."""
    if not simulated.plan.uses_sets or runtime.topology.size < 2:
        return None
    known = {tuple(ranks): number for number, ranks in runtime.process_set_ids_and_ranks().items()}
    if (0, 1) in known:
        return known[0, 1]
    if state.has_set:
        simulated.breach("the process set of an earlier generation is gone")
    state.has_set = True
    return runtime.add_process_set([0, 1])


def take_step(state: State, indices: list[int], set_id: int | None) -> None:
    """Train on a batch: ranks submit what they reduce in any order."""
    simulated.check_alike("before a step", [state.epoch, state.step, state.digest, state.seen])
    begun = {}
    for name in simulated.shuffled(["sum", "largest", "samples"]):
        if name == "samples":
            collective = Collective(Kind.ALLGATHER, name)
            begun[name] = runtime.submit(collective, [torch.tensor(indices)])
        else:
            begun[name] = reduce(name, sum(indices), Sum if name == "sum" else Max)
    in_set = None
    if set_id is not None and runtime.topology.rank < 2:
        in_set = reduce("in a set", 1.0 + runtime.topology.rank, set_id=set_id)
    found = {name: begun[name].wait()[0].tolist() for name in sorted(begun)}
    if in_set is not None and in_set.wait()[0].tolist() != [3.0]:
        simulated.breach(f"the process set's sum is {in_set.wait()[0].tolist()}, not 3")
    if found["sum"] != [float(sum(found["samples"]))]:
        simulated.breach(f"the sum of {found['samples']} is {found['sum']}")
    simulated.check_alike("after a step", [found, runtime.channel(WORLD).rounds.num_run])
    state.digest = simulated.digest(state.digest, state.step, found["sum"])
    state.seen = (*state.seen, *found["samples"])
    state.most_ranks = max(state.most_ranks, runtime.topology.size)
    state.step += 1


def end_epoch(state: State) -> None:
    """Check what was seen; then let ranks run out of data at different times."""
    simulated.check_epoch(state.seen, state.most_ranks)
    if simulated.plan.uses_join:
        size, rank = runtime.topology.size, runtime.topology.rank
        for number in range((rank + state.epoch) % 3):
            (found,) = reduce(f"rest {number}", 1.0).wait()[0].tolist()
            expected = sum((each + state.epoch) % 3 > number for each in range(size))
            if found != expected:
                simulated.breach(f"{expected} ranks had data left, and the sum is {found}")
        simulated.check_alike("after a join", runtime.join().wait())


def train(state: State) -> None:
    """Train for all epochs, from wherever the state is."""
    simulated.begins(state._version, state.step)
    plan = simulated.plan
    set_id = find_set(state)
    while state.epoch < plan.epochs:
        for number in range(-(-len(state.sampler) // plan.batch)):
            time.sleep(plan.pace * simulated.jitter())
            indices = state.sampler.get_indices(number, plan.batch)
            take_step(state, indices, set_id)
            state.sampler.record_batch(number, len(indices))
            if state.step % plan.commit_every == 0:
                state.commit()
        end_epoch(state)
        state.epoch += 1
        state.seen, state.most_ranks = (), 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def main() -> None:
    """Train to the end."""
    init()
    sampler = ElasticSampler(range(simulated.plan.samples), seed=simulated.plan.seed)
    folder = simulated.disk and simulated.disk.path
    start = {"epoch": 0, "step": 0, "digest": "", "seen": (), "most_ranks": 1, "has_set": False}
    state = State(checkpoint_dir=folder, sampler=sampler, **start)
    run_fn(train, reset, this_worker)(state)
    simulated.finished([state.epoch, state.step, state.digest])
    runtime.shutdown()
