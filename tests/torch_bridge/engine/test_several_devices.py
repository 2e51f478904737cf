"""Programs over several devices take turns, wherever they got their mesh from."""

from __future__ import annotations

import jax
import pytest
import torch

import isoshard as iso
from isoshard import P
from isoshard.core.layout.axis_types import auto
from isoshard.core.runtime import serialize_virtual
from isoshard.torch_bridge.engine.compiling import program


def _reads_an_input(mesh):
    return iso.shard(torch.ones(8, 4), mesh, P("x")).sum()


def _marks_what_it_makes(mesh):
    return iso.shard(torch.ones(8, 4, device="jax"), mesh, P("x")).sum()


def _maps_over_shards(mesh):
    mesh = auto(mesh)  # along Explicit axes, shard_map takes what lies so already
    total = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    return iso.torch_function(total)(torch.ones(8, 4, device="jax") + 1).sum()


def _stays_on_one(mesh):
    return torch.ones(8, 4, device="jax").sum()


@pytest.mark.parametrize(
    ("compute", "several"),
    [
        (_reads_an_input, True),
        (_marks_what_it_makes, True),
        (_maps_over_shards, True),
        (_stays_on_one, False),
    ],
)
def test_a_program_over_several_devices_takes_a_turn(compute, several, monkeypatch):
    noted, ran, note = [], [], serialize_virtual.note
    monkeypatch.setattr(
        serialize_virtual, "note", lambda results: (noted.append(results), note(results))
    )
    monkeypatch.setattr(program, "WATCHING", [lambda one, plan: ran.append(one.several)])
    compute(iso.make_mesh((8,), ("x",))).item()
    assert ran and any(ran) == several
    assert len(noted) == sum(ran)
