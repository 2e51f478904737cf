"""Programs over several devices take turns, wherever they got their mesh from."""

from __future__ import annotations

import jax
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


def test_a_program_over_several_devices_takes_a_turn(monkeypatch):
    noted, ran, note = [], [], serialize_virtual.note
    monkeypatch.setattr(
        serialize_virtual, "note", lambda results: (noted.append(results), note(results))
    )
    monkeypatch.setattr(program, "WATCHING", [lambda one, plan: ran.append(one.several)])
    mesh = iso.make_mesh((8,), ("x",))
    for compute in (_reads_an_input, _marks_what_it_makes, _maps_over_shards, _stays_on_one):
        noted.clear(), ran.clear()
        compute(mesh).item()
        assert ran and any(ran) == (compute is not _stays_on_one)
        assert len(noted) == sum(ran)
