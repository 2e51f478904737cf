"""Exports of torch: weights by their names, plans on the graph, what is refused."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import isoshard as iso
from isoshard import P
from isoshard.core.errors import ShardingError
from isoshard.core.plan import Activation, Plan, PlanError
from isoshard.onnx_bridge import (
    AnnotationWarning,
    Graph,
    ModelError,
    export_torch,
    layout,
    parameters_of,
)
from isoshard.onnx_bridge.annotating.weight_layouts import modules_around
from tests.onnx_bridge.exports import CASES
from tests.onnx_bridge.torch_models import MLP, MLP_PLAN, seeded


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 2), ("dp", "tp"))


class Odd(nn.Module):
    """Weights that are scaled, cut, gathered, taken apart and fused before they are used."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(8, 16))
        self.cut = nn.Parameter(torch.randn(32, 16))
        self.rows = nn.Embedding(10, 16)
        self.heads = nn.Parameter(torch.randn(16, 2, 4))
        self.stacked = nn.Parameter(torch.randn(1, 8, 3))

    def forward(self, x):
        x = x @ (self.scaled * 0.5).T @ self.cut[:8]
        x = x + self.rows(torch.tensor([0, 3, 3, 9]))
        return x @ self.heads.flatten(1) @ self.stacked.squeeze(0)


ODD_PLAN = Plan(
    {"scaled": P("tp"), "cut": P("tp"), "rows.*": P("dp", "tp"), "heads": P("dp", "tp")},
    default=P(),
)


@pytest.fixture(scope="module")
def odd():
    mesh = iso.make_mesh((2, 2), ("dp", "tp"))
    module = seeded(Odd)
    x = torch.randn(4, 16)
    return module, x, export_torch(module, (x,), mesh, ODD_PLAN)


def _arrays(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


class TestNames:
    @pytest.mark.parametrize("name", CASES)
    def test_every_weight_is_traced_and_has_its_values(self, name, exported):
        one = exported(name)
        arrays, origins = _arrays(one.model), parameters_of(one.model)
        weights = {k: t.detach().numpy() for k, t in one.module.named_parameters()}
        folded = {"cnn": {"norm.weight", "norm.bias"}}.get(name, set())
        assert {origin.parameter for origin in origins.values()} == set(weights) - folded
        for tensor, (weight, axes) in origins.items():
            if folded or None in axes:
                continue
            kept = tuple(slice(0, size) for size in np.transpose(arrays[tensor], _back(axes)).shape)
            np.testing.assert_array_equal(
                arrays[tensor], np.transpose(weights[weight][kept], axes), err_msg=tensor
            )

    def test_equal_weights_get_their_own_tensors_back(self, exported):
        model = exported("gpt").model
        ones = [k for k, v in _arrays(model).items() if v.shape == (16,) and (v == 1).all()]
        assert sorted(ones) == sorted(
            ["blocks.0.norm1.weight", "blocks.0.norm2.weight", "norm.weight"]
        )
        graph = Graph(model)
        for name in ones:
            (reader,) = graph.consumers(name)
            assert f"{name.removesuffix('.weight')}" in modules_around(reader)

    def test_constants_made_of_weights_are_followed(self, odd):
        found = {o.parameter: o.axes for o in parameters_of(odd[2]).values()}
        assert found == {
            "scaled": (1, 0),
            "cut": (0, 1),
            "rows.weight": (None, 1),
            "heads": (0, None),
            "stacked": (1, 2),
        }

    def test_their_specs_follow_too(self, odd):
        module, x, model = odd
        by_weight = {
            origin.parameter: layout(model).parameters[tensor][0].spec
            for tensor, origin in parameters_of(model).items()
        }
        assert by_weight == {
            "scaled": P(None, "tp"),
            "cut": P("tp"),
            "rows.weight": P(None, "tp"),
            "heads": P("dp"),
            "stacked": P(),
        }
        result = iso.onnx.compile(model)(x.numpy())
        np.testing.assert_allclose(result, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class TestPlans:
    def test_activations_are_the_results_of_modules(self, exported):
        model = exported("gpt").model
        found = layout(model)
        said = {name for (_, name) in found.shardings if name not in found.graph.initializers}
        results = said - set(found.graph.inputs)
        made = [modules_around(found.graph.producer(name)) for name in results]
        assert sorted(modules[-1] for modules in made) == ["blocks.0"]

    def test_two_specs_for_one_value_are_an_error(self, mesh):
        plan = Plan(activations={"up": P("tp"), "down": Activation(input=P("dp"))}, default=P())
        module = nn.Sequential()
        module.add_module("up", nn.Linear(4, 4))
        module.add_module("down", nn.Linear(4, 4))
        with pytest.raises(ShardingError, match=r"'linear' is .*'dp'.* and .*'tp'|'tp'.*'dp'"):
            export_torch(module.eval(), (torch.randn(4, 4),), mesh, plan)

    def test_a_plan_that_does_not_fit_is_an_error_before_anything_is_exported(self, mesh):
        with pytest.raises(PlanError, match=r"up\.weight: .*no mesh axis is called 'zz'"):
            export_torch(seeded(MLP), ("no tensor",), mesh, Plan({"up.*": P("zz")}, default=P()))


class TestRefusals:
    def test_training_mode(self, mesh):
        with pytest.raises(ModelError, match=r"MLP is in training mode.*call module\.eval\(\)"):
            export_torch(MLP(), (torch.randn(8, 16),), mesh, MLP_PLAN)

    def test_no_layout(self, mesh):
        with pytest.raises(
            ShardingError, match="MLP is not sharded: its tensors are on cpu, and there"
        ):
            export_torch(seeded(MLP), (torch.randn(8, 16),), mesh)

    def test_no_mesh(self):
        with pytest.raises(ShardingError, match="MLP is on no mesh of its own; pass one"):
            export_torch(seeded(MLP), (torch.randn(8, 16),), None, MLP_PLAN)

    def test_what_torch_cannot_export(self, mesh):
        class Branch(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        with pytest.raises(ModelError, match="torch cannot export Branch"):
            export_torch(Branch().eval(), (torch.randn(4),), mesh, Plan(default=P()))


def test_saved_with_its_weights_beside_it(mesh, tmp_path, monkeypatch):
    """Its plan says inputs of modules too; what a file cannot say is left out with a warning."""
    said = {"up": (..., "tp"), "down": Activation(input=P("dp", "tp"))}
    plan = MLP_PLAN.otherwise(Plan(activations=said))
    monkeypatch.setattr("isoshard.onnx_bridge.exporting.finishing._EXTERNAL_FROM", 0)
    x = torch.randn(8, 16)
    with pytest.warns(AnnotationWarning, match=r"to the compiler.*'linear' \(output of 'up'\)"):
        model = export_torch(seeded(MLP), (x,), mesh, plan, path=tmp_path / "mlp.onnx")
    assert layout(model).sharding(0, "linear") is None
    assert layout(model).sharding(1, "relu").spec == P("dp", "tp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.onnx", "mlp.onnx.data"]
    assert _arrays(model).keys() == _arrays(iso.onnx.load(tmp_path / "mlp.onnx")).keys()
    result = iso.onnx.compile(tmp_path / "mlp.onnx")(x.numpy())
    np.testing.assert_allclose(result, seeded(MLP)(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def _back(axes):
    return np.argsort(axes)
