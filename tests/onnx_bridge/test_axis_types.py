"""ONNX models on meshes of every axis type: results equal, layouts on the mesh that was given."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.sharding import AxisType, NamedSharding
from onnx import helper

import isoshard as iso
from isoshard import P
from isoshard.core.layout.axis_types import auto, same_grid
from isoshard.onnx_bridge import annotate, compile, export_jax, layout
from isoshard.onnx_bridge.layouts.meshes import submesh

KINDS = {"explicit": (AxisType.Explicit,) * 2, "mixed": (AxisType.Explicit, AxisType.Auto)}
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
W = np.linspace(-2, 2, 128, dtype=np.float32).reshape(8, 16)
V = np.linspace(-1, 2, 128, dtype=np.float32).reshape(16, 8)
SPECS = {"x": P("a"), "w": P(None, "b"), "v": P("b"), "y": P("a")}


@pytest.fixture(params=KINDS)
def typed(request):
    """The mesh (2, 4) of every kind."""
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=KINDS[request.param])


def model() -> onnx.ModelProto:
    """y = relu(x w) v, and the hidden value, of which nothing is said."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["before"], name="up"),
        helper.make_node("Relu", ["before"], ["hidden"], name="act"),
        helper.make_node("MatMul", ["hidden", "v"], ["y"], name="down"),
    ]
    weights = [
        helper.make_tensor("w", 1, W.shape, W.ravel()),
        helper.make_tensor("v", 1, V.shape, V.ravel()),
    ]
    outs = [value("y", 1, [8, 8]), value("hidden", 1, [8, 16])]
    graph = helper.make_graph(nodes, "g", [value("x", 1, [8, 8])], outs, weights)
    return helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 20)])


HIDDEN = np.maximum(X @ W, 0)


def test_layouts_and_results_are_on_the_mesh_given(typed, counted):
    annotated = annotate(model(), typed, SPECS)
    found = layout(annotated, typed)
    assert found.stages[0].mesh == typed
    assert found.parameters["w"][0] == NamedSharding(typed, P(None, "b"))
    run = compile(annotated, typed)
    assert run.parameters[0]["v"].sharding == NamedSharding(typed, P("b"))
    assert run.input_shardings["x"].mesh == typed
    x = iso.shard(X, auto(typed), P("a"))
    before = counted("copied_bytes"), counted("gathers")
    got = run(x)
    assert (counted("copied_bytes"), counted("gathers")) == before
    assert annotated == annotate(model(), auto(typed), SPECS)  # a file does not depend on types
    for context, x in ((typed, X), (auto(typed), iso.shard(X, typed, P("a")))):
        with jax.set_mesh(context):
            np.testing.assert_allclose(run(x)["y"], HIDDEN @ V, rtol=1e-5)
    for name, wanted in (("y", HIDDEN @ V), ("hidden", HIDDEN)):
        assert got[name].sharding.mesh == typed
        np.testing.assert_allclose(got[name], wanted, rtol=1e-5)
    assert got["y"].sharding.is_equivalent_to(NamedSharding(typed, P("a")), 2)


def test_inside_jit_and_grad(typed):
    run = compile(annotate(model(), typed, SPECS), typed)
    x = iso.shard(X, typed, P("a"))

    def loss(parameters, x):
        return (iso.reshard(run.apply(parameters, x)["y"], typed, P()) ** 2).sum()

    types = []
    y = jax.jit(lambda x: types.append(jax.typeof(got := run(x)["y"])) or got)(x)
    assert y.sharding.is_equivalent_to(NamedSharding(typed, P("a")), 2)
    if typed.are_all_axes_explicit:
        assert types[0].sharding.spec == P("a", None)
    gradients = jax.jit(jax.grad(loss))(run.parameters, x)
    other = compile(annotate(model(), auto(typed), SPECS), auto(typed))

    def plain(parameters, x):
        return (other.apply(parameters, x)["y"] ** 2).sum()

    wanted = jax.jit(jax.grad(plain))(other.parameters, jnp.asarray(X))
    for name in ("w", "v"):
        got = gradients[0][name]
        assert same_grid(got.sharding.mesh, typed)
        np.testing.assert_allclose(got, wanted[0][name], rtol=1e-4)
        if typed.are_all_axes_explicit:
            assert jax.typeof(got) == jax.typeof(run.parameters[0][name])


def test_a_stage_keeps_the_types_of_its_axes():
    kinds = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2, 2), ("a", "stage", "b"), axis_types=kinds)
    part = submesh(mesh, [0, 1, 4, 5]).mesh
    assert part.axis_names == ("a", "b") and part.axis_types == (kinds[0], kinds[2])
    annotated = annotate(model(), mesh, SPECS, stages={"up": 0, "act": 0, "down": 1})
    run = compile(annotated, mesh)
    assert [stage.mesh.axis_types for stage in run.layout.stages] == [(kinds[0], kinds[2])] * 2
    got = run(X)
    np.testing.assert_allclose(got["y"], HIDDEN @ V, rtol=1e-5)
    assert jax.typeof(got["y"]).sharding.spec == P("a", None)
    assert got["hidden"].sharding.mesh == run.layout.stages[0].mesh
    with jax.set_mesh(mesh):  # of all stages
        again = compile(annotated, mesh)(X)
    np.testing.assert_allclose(again["y"], HIDDEN @ V, rtol=1e-5)


def test_a_function_for_explicit_axes_becomes_a_file():
    pytest.importorskip("jax2onnx")
    typed = jax.make_mesh((2, 4), ("a", "b"))
    params = {"w": iso.shard(W, typed, P(None, "b")), "v": iso.shard(V, typed, P("b"))}
    x = iso.shard(X, typed, P("a"))

    def fn(params, x):
        hidden = jax.nn.relu(x @ params["w"])
        return jnp.dot(hidden, params["v"], out_sharding=P("a"))

    with jax.set_mesh(typed):
        made = export_jax(fn, (x,), params=params)
        wanted = fn(params, x)
    found = layout(made, typed)
    assert found.inputs["x"].spec == P("a") and found.parameters["v"][0].spec == P("b")
    run = compile(made, typed)
    got = run(X)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert got.sharding == NamedSharding(typed, P("a"))


def test_the_ambient_mesh_is_that_of_an_export():
    pytest.importorskip("jax2onnx")
    with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"))):
        made = export_jax(lambda x: jax.sharding.reshard(x * 2, P("a", "b")), (X,))
        np.testing.assert_array_equal(compile(made)(X), 2 * X)
    assert dict(layout(made).stages[0].mesh.shape) == {"a": 2, "b": 4}
