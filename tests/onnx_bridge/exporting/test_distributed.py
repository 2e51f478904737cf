"""Modules whose weights are on devices already: of DTensors, and on the device `jax`."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import isoshard as iso
from isoshard.onnx_bridge import export_torch, layout
from tests import fresh
from tests.onnx_bridge.torch_models import MLP, MLP_PLAN, seeded
from tests.python_path import python_path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("distributed_process.py")
PARALLEL = {
    "up.weight": ["tp", "None"],
    "up.bias": ["tp"],
    "down.weight": ["None", "tp"],
    "down.bias": [],
}


def _trimmed(specs):
    """Specs without the None entries at their ends."""
    found = {}
    for name, entries in specs.items():
        while entries and entries[-1] == "None":
            entries = entries[:-1]
        found[name] = entries
    return found


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def wanted(x):
    with torch.no_grad():
        return seeded(MLP)(torch.from_numpy(x)).numpy()


@pytest.fixture(scope="module")
def found(x, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dtensor")
    np.save(folder / "x.npy", x)
    files = [str(folder / name) for name in ("x.npy", "found.json")]
    done = fresh.run(SCRIPT, files, cwd=folder, env={"PYTHONPATH": python_path(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


class TestDTensor:
    def test_placements_are_specs_and_the_twin_computes_the_same(self, found, wanted):
        specs, result = found["parallel"]
        assert _trimmed(specs) == _trimmed(PARALLEL)
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)

    def test_gathers_are_counted_and_the_module_keeps_its_hooks(self, found):
        assert found["gathers"] == 4
        assert found["hooks"] == [1, 1]

    def test_the_mesh_may_be_that_of_the_tensors(self, found):
        specs, mesh = found["fake"]
        assert _trimmed(specs) == _trimmed(PARALLEL)
        assert mesh == {"tp": 2}  # the slice that the tensors are on

    def test_what_cannot_be_copied_needs_a_twin(self, found, wanted):
        assert "FSDPMLP cannot be copied" in found["fsdp"]
        assert "twin=plain_module" in found["fsdp"]
        specs, result = found["twin"]
        assert all(entries[0] == "dp" for entries in specs.values())
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)

    def test_a_twin_of_another_class_is_refused(self, found):
        assert "are not the same module" in found["other"]

    def test_faults_of_all_tensors_are_told_at_once(self, found):
        assert "up.weight: Partial over 'tp' cannot be written" in found["faults"]
        assert "down.weight: its DeviceMesh of shape (1,) has no names" in found["faults"]


class TestTheDeviceJax:
    def test_it_exports_as_the_plain_module_does(self, x):
        mesh = iso.make_mesh((2, 2), ("dp", "tp"))
        placed = iso.shard(seeded(MLP), mesh, MLP_PLAN)
        model = export_torch(placed, (torch.from_numpy(x),))  # its own mesh, its own layout
        specs = {name: held[0].spec for name, held in layout(model).parameters.items()}
        planned = MLP_PLAN.resolve(placed, mesh).specs
        assert specs == {name: planned[name] for name in specs} and len(specs) == 4
        weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
        np.testing.assert_array_equal(weights["up.weight"], seeded(MLP).up.weight.detach())
        assert placed.up.weight.device.type == "jax"

    def test_another_mesh_gets_the_same_pieces(self, x):
        placed = iso.shard(seeded(MLP), iso.make_mesh((4,), ("tp",)), MLP_PLAN)
        mesh = iso.make_mesh((2, 2), ("a", "b"))
        model = export_torch(placed, (torch.from_numpy(x),), mesh)
        assert layout(model).parameters["up.weight"][0].spec == iso.P(("a", "b"))
