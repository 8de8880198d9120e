"""The plan of one optimizer: what its ranks have agreed on, and what follows for its buckets.

Made by `horovod.torch.gradients.reducer` in the first step, and anew when the ranks change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from horovod.engine.arguments import set_id
from horovod.engine.runtime import runtime
from horovod.torch.gradients.agreement import Agreement, agree, propose
from horovod.torch.gradients.bucketing import (
    Bucketing,
    BucketPolicy,
    Measurement,
    can_overlap,
    device_bucket,
)
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.direct_reducer import lane_device
from horovod.torch.gradients.submission import BucketSubmitter


class BucketPlan(NamedTuple):
    """What all ranks go by when they cut buckets."""

    agreed: Agreement
    is_complete: bool  # whether all ranks took part; if one has joined, the plan is for one step
    policy: BucketPolicy
    params: list[Named]  # in the order in which their gradients arrived on the first rank
    lane_device: torch.device | None  # the device whose library reduces them, if one does

    def first_bucketing(self, on_lane: bool) -> Bucketing:
        """Return how to reduce in the first steps, and what to measure in them."""
        policy = self.policy
        if not on_lane:
            return policy.at_first() if self.is_complete else policy.unmeasured()
        measurement = Measurement.EVERYTHING if policy.autotune else Measurement.NOTHING
        if policy.delayed and policy.overlap:
            measurement = Measurement.NETWORK
        bucket_bytes = device_bucket(policy.limit, policy.delayed)
        return Bucketing(policy.overlap, bucket_bytes, measurement)


def make_plan(
    params: Sequence[Named],
    arrivals: Sequence[int],
    is_grouped: bool,
    submitter: BucketSubmitter,
) -> BucketPlan:
    """Agree with the other ranks on name, order, and which gradients are sparse. Collective.

    Args:
        params: All parameters of the optimizer.
        arrivals: Indices of the parameters whose gradients have arrived, in that order.
        is_grouped: Whether the user says what the buckets are.
        submitter: The submitter of the buckets, which learns the name and the sparse gradients.
    """
    device = lane_device(param for _, param in params)
    on_device = device is not None or any(not param.is_cpu for _, param in params)
    crosses_hosts = runtime.crosses_hosts(set_id(submitter.process_set))
    proposal = propose(
        can_overlap(on_device, crosses_hosts, runtime.config.overlap_backward),
        submitter.lane_reduction() is not None and device is not None,
        arrivals,
        submitter.find_sparse(param for _, param in params),
    )
    agreed, is_complete = agree(proposal, submitter.process_set)
    submitter.name = f"DistributedOptimizer.{agreed.number}"
    dims = zip(params, agreed.sparse_dims, strict=True)
    submitter.sparse_dims = {param: dim for (_, param), dim in dims if dim}
    policy = BucketPolicy(
        num_bytes=sum(param.nbytes for _, param in params),
        limit=agreed.fusion_threshold,
        overlap=agreed.overlap,
        on_device=on_device,
        crosses_hosts=crosses_hosts,
        spare_cores=agreed.spare_cores,
        fixed=agreed.fixed,
        autotune=agreed.autotune,
        grouped=is_grouped,
        hooked=submitter.hook is not None,
        delayed=submitter.is_exclusive,
    )
    in_order = [params[index] for index in agreed.order]
    uses_lane = is_complete and agreed.direct
    return BucketPlan(agreed, is_complete, policy, in_order, device if uses_lane else None)
