"""One core Plan for torch, Flax and ONNX; core's verbs on a model."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
import torch
from jax.sharding import PartitionSpec as P
from onnx import helper, numpy_helper

import isoshard as iso
from isoshard.core.plan import Linear, Plan
from isoshard.onnx_bridge import annotate, layout
from isoshard.onnx_bridge.reading.parameter_record import Origin, write_parameters
from tests.onnx_bridge.models import FLOAT, mlp

PLAN = Plan(
    {"*up.*": Linear(out="model"), "*down.*": Linear(into="model")},
    inputs=P("data"),
    activations={"up": P("data", "model")},
)


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 2), ("data", "model"))


def exported():
    """x @ up.weight.T + up.bias, and down, as torch's exporter leaves it: folded and renamed."""
    rng = np.random.default_rng(0)
    shapes = {"val_0": (8, 16), "up.bias": (16,), "val_1": (16, 8), "down.bias": (8,)}
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = []
    for name, read, weight, bias, made in (
        ("up", "x", "val_0", "up.bias", "h"),
        ("down", "h", "val_1", "down.bias", "y"),
    ):
        nodes.append(helper.make_node("MatMul", [read, weight], [f"{name}_mm"], name=f"{name}_mm"))
        nodes.append(helper.make_node("Add", [f"{name}_mm", bias], [made], name=f"{name}_add"))
        for node in nodes[-2:]:
            scopes = str(["", name, node.name])
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    x = helper.make_tensor_value_info("x", FLOAT, ["n", 8])
    y = helper.make_tensor_value_info("y", FLOAT, ["n", 8])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    opset = helper.make_opsetid("", 18)
    model = helper.make_model(graph, ir_version=11, opset_imports=[opset])
    origins = {"val_0": Origin("up.weight", (1, 0)), "val_1": Origin("down.weight", (1, 0))}
    write_parameters(model, origins)
    return model


def torch_specs(mesh):
    net = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 16), "down": torch.nn.Linear(16, 8)})
    return PLAN.resolve(net, mesh).specs


def flax_specs(mesh):
    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return flax.linen.Dense(8, name="down")(flax.linen.Dense(16, name="up")(x))

    shapes = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 8)))["params"]
    return PLAN.resolve(shapes, mesh).specs


def test_the_same_plan_as_torch_and_flax(mesh):
    model = exported()
    assert PLAN.resolve(model, mesh).specs == torch_specs(mesh)
    found = layout(annotate(model, mesh, PLAN))
    flax_made = flax_specs(mesh)
    assert found.parameters["val_0"][0].spec == flax_made["up.kernel"] == P(None, "model")
    assert found.parameters["val_1"][0].spec == flax_made["down.kernel"] == P("model")
    assert found.parameters["up.bias"][0].spec == flax_made["up.bias"] == P("model")
    assert found.inputs["x"].spec == P("data")
    assert found.sharding(1, "h").spec == P("data", "model")


def test_core_verbs(mesh):
    annotated = iso.shard(exported(), mesh, PLAN)
    specs = {name: sharding.spec for name, sharding in iso.sharding_of(annotated).items()}
    assert specs == torch_specs(mesh)
    assert "P('model',)" in iso.visualize(annotated)
    assert iso.onnx.layout(annotated).inputs["x"].spec == P("data")
    with pytest.raises(iso.errors.CopyError, match="an annotated model is a copy"):
        iso.shard(exported(), mesh, PLAN, copy=False)


def test_shapes_and_indices_are_no_parameters(mesh):
    model = mlp()
    shape = helper.make_tensor("shape", onnx.TensorProto.INT64, [2], [8, 16])
    model.graph.initializer.append(shape)
    model.graph.node.append(helper.make_node("Reshape", ["y1", "shape"], ["z"]))
    done = annotate(model, mesh, Plan({"*": P("model")}))
    assert not done.graph.node[-1].device_configurations


def test_two_tensors_made_of_one_weight(mesh):
    """A weight that was split: one name, two shapes."""
    model = mlp()
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.zeros((8, 4), np.float32), "w1"))
    write_parameters(model, {"w0": Origin("qkv", (1, 0)), "w1": Origin("qkv", (1, 0))})
    found = layout(annotate(model, mesh, Plan({"qkv": P("model")})))
    assert {found.parameters[name][0].spec for name in ("w0", "w1")} == {P(None, "model")}
