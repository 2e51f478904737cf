"""DTensor placements wherever a spec is taken."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import isoshard as iso
from isoshard import P
from isoshard.core.errors import SpecError
from isoshard.core.layout.spec import normalize_spec
from isoshard.torch_bridge.dtensor.spelling import is_placements


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 4), ("data", "x"))


def test_placements_lay_out_arrays_and_tensors(mesh):
    for x in (np.zeros((8, 4), np.float32), torch.zeros(8, 4)):
        laid = iso.shard(x, mesh, [Shard(1), Shard(0)])
        assert iso.sharding_of(laid).spec == P("x", "data")


def test_they_mean_what_the_entries_of_a_spec_mean(mesh):
    assert normalize_spec((Replicate(), Shard(-1)), mesh, 3) == P(None, None, "x")
    assert normalize_spec((Shard(0), Shard(0)), mesh, 1) == P(("data", "x"))


def test_wrong_ones_are_named(mesh):
    with pytest.raises(SpecError, match="one Shard"):
        normalize_spec((Shard(0),), mesh, 2)
    with pytest.raises(SpecError, match="do not fit"):
        normalize_spec((Shard(5), Replicate()), mesh, 2)
    with pytest.raises(SpecError, match="do not fit"):
        normalize_spec((Partial(), Replicate()), mesh, 2)


def test_other_sequences_are_no_placements():
    assert not is_placements(())
    assert not is_placements(("x", None))
    assert not is_placements("x")
