"""Where torch_xla is not installed; with it, `make test-torch-xla` runs tests/with_torch_xla."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import require
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.spec import same_layout
from isoshard.core.layout.tiles import Tiles
from isoshard.torch_bridge.common import old_torch
from isoshard.torch_xla_bridge import torch_xla_backend
from isoshard.torch_xla_bridge.torch_xla_backend import anonymous, backend_framework, real
from tests import fresh


@pytest.mark.parametrize("use", [
    lambda mesh: torch_xla_backend.mesh_to_torch_xla(mesh),
    lambda mesh: torch_xla_backend.from_jax(jnp.ones(8)),
    lambda mesh: real.load("torch_xla.runtime"),
])  # fmt: skip
def test_without_torch_xla_it_says_what_to_install(mesh, use):
    with pytest.raises(ImportError, match=r"pip install torch==2\.9\.0 torch_xla==2\.9\.0"):
        use(mesh)


def test_tensors_of_other_devices_are_refused_first(mesh):
    with pytest.raises(ShardingError, match=r"on torch_xla's device, .* is on jax:0"):
        torch_xla_backend.mark(torch.ones(8, device="jax"), mesh, P("x"))


def test_isoshards_own_torch_xla_is_not_taken_for_the_real_one(tmp_path):
    program = (
        "import isoshard.torch_xla_bridge.drop_in as drop_in\n"
        "drop_in.install()\n"
        "import torch_xla\n"
        "from isoshard.torch_xla_bridge.torch_xla_backend import real\n"
        "real.load('torch_xla.runtime')"
    )
    assert (
        "ImportError: torch_xla means isoshard's own modules"
        in fresh.run(program, cwd=tmp_path).stderr
    )


def test_the_bridge_keeps_serving_torch_here():
    backend_framework.register_if_old()
    assert not isinstance(require("torch"), old_torch.OldTorch)


@pytest.mark.parametrize(
    ("version", "has"),
    [("2.9.0+cu128", False), ("2.9.1", False), ("2.10.0", True), ("2.10.0.dev20251101", True)],
)
def test_versions_are_compared_as_numbers(monkeypatch, version, has):
    monkeypatch.setattr(torch, "__version__", version)
    assert old_torch.has_device() is has


@pytest.mark.parametrize(
    "spec", [P(), P("a"), P(None, "b"), P("c", "a"), P(("c", "a"), "b"), P("b", ("c", "a"))]
)
def test_a_layout_without_a_mesh_is_the_same_on_one_made_for_it(spec):
    mesh = make_mesh((2, 2, 2), ("a", "b", "c"))
    found = anonymous.by_itself(Tiles.from_spec(spec, mesh, 2))
    assert same_layout(found, NamedSharding(mesh, spec), 2)
    assert list(found.mesh.devices.flat) == list(mesh.devices.flat)


def test_devices_in_no_regular_order_have_a_mesh_too():
    tiles = Tiles(np.array([3, 1, 0, 2, 7, 6, 5, 4]).reshape(1, 4, 2))
    found = anonymous.by_itself(tiles)
    assert found.spec == P(None, "dim1")
    assert [device.id for device in found.mesh.devices.flat] == [3, 1, 0, 2, 7, 6, 5, 4]
