"""Signatures of collectives, without any processes."""

from __future__ import annotations

import pytest
import torch

from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Collective, Kind, LanePlan, Reduction, signature_of

BASE = Collective(Kind.ALLREDUCE, "x")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)]
)
def test_a_signature_covers_the_form_of_tensors(tensor: torch.Tensor):
    assert signature_of(BASE, "x", [tensor]) != signature_of(BASE, "x", [torch.zeros(3)])


@pytest.mark.parametrize(
    "other",
    [
        {"reduction": Reduction(ReduceOp.MIN)},
        {"reduction": Reduction(prescale_factor=2.0)},
        {"reduction": Reduction(postscale_factor=0.5)},
        {"reduction": Reduction(wire=torch.bfloat16)},
        {"labels": ("a",)},
        {"root_rank": 1},
        {"reason": "it has the key"},
        {"change": ("add", 0)},
        {"plan": LanePlan(("float32",), (3,))},
        {"kind": Kind.BROADCAST},
    ],
)
def test_a_signature_covers_all_that_must_agree(other: dict[str, object]):
    tensors = [torch.zeros(3)]
    mine = signature_of(BASE, "x", tensors)
    assert mine == signature_of(Collective(Kind.ALLREDUCE, "x"), "x", tensors)
    assert mine != signature_of(BASE._replace(**other), "x", tensors)  # type: ignore[arg-type]
    assert mine != signature_of(BASE, "y", tensors)


def test_every_field_is_compared_but_the_set_and_the_splits():
    """The name is part of the one on the wire; each set has its own queue."""
    others = {"kind", "reduction", "labels", "root_rank", "reason", "change", "plan"}
    assert set(Collective._fields) == others | {"name", "process_set_id", "splits"}
    unequal = BASE._replace(process_set_id=3, splits=(1, 2))
    assert signature_of(unequal, "x", [torch.zeros(3)]) == signature_of(BASE, "x", [torch.zeros(3)])


def test_the_first_dimension_may_differ_where_ranks_gather():
    for kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        collective = Collective(kind, "x")
        few, many = (signature_of(collective, "x", [torch.zeros(n, 2)]) for n in (1, 9))
        assert few == many
        assert few != signature_of(collective, "x", [torch.zeros(1, 3)])
