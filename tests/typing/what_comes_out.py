# pyright: strict
"""What goes in comes out: arrays, trees, tensors and modules, by the overloads of the verbs.

pyright alone reads this: mypy does not follow JAX's imports here (mypy.ini), and so takes a
`jax.Array` for anything.
"""

from pathlib import Path
from typing import assert_type

import jax
import numpy as np
import torch
from jax.sharding import Mesh

import isoshard as iso
from isoshard import P


def what_goes_in_comes_out(
    rows: np.ndarray, tree: dict[str, np.ndarray], layer: torch.nn.Linear, mesh: Mesh
) -> None:
    assert_type(iso.shard(rows, mesh, P("x")), jax.Array)
    assert_type(iso.shard([1.0, 2.0], mesh, P("x")), jax.Array)
    assert_type(iso.shard(tree, mesh, iso.Plan({"*": P()})), dict[str, jax.Array])
    assert_type(iso.shard([rows, rows], mesh, P()), list[jax.Array])
    assert_type(iso.shard(layer, mesh, P()), torch.nn.Linear)
    assert_type(iso.shard(layer.weight, mesh, P()), torch.Tensor)
    assert_type(iso.shard(rows, mesh, P("x"), uneven="pad"), jax.Array | iso.UnevenArray)
    assert_type(iso.reshard(rows, mesh, P("x")), jax.Array)
    sharded = iso.shard(tree, mesh, P("x"))
    assert_type(iso.reshard(sharded, P()), dict[str, jax.Array])
    assert_type(iso.reshard(layer, P()), torch.nn.Linear)
    assert_type(iso.to_jax(rows), jax.Array)


def save_and_restore(folder: Path, layer: torch.nn.Linear, mesh: Mesh) -> None:
    iso.save(folder, {"w": np.ones(4)}).wait()
    shapes = {"w": jax.ShapeDtypeStruct((4,), "float32")}
    assert_type(iso.restore(folder, shapes, mesh, P("x")), dict[str, jax.Array])
    assert_type(iso.restore(folder, layer, step=3), torch.nn.Linear)
