"""JAX to a file: layouts come out as annotations, and the file computes what the function does."""

import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
from isoshard import P
from isoshard.core.errors import ShardingError
from isoshard.core.installation import install_command
from isoshard.core.plan import Plan, PlanError
from isoshard.onnx_bridge import (
    AnnotationError,
    AnnotationWarning,
    Graph,
    ModelError,
    compile,
    export_jax,
    layout,
    validate,
)
from tests.onnx_bridge.exporting import jax_models
from tests.onnx_bridge.exporting.jax_models import laid

pytest.importorskip("jax2onnx")

RNG = np.random.default_rng(0)
X, W, V = (RNG.normal(size=s).astype(np.float32) for s in ((8, 16), (16, 32), (32, 16)))


def wide():
    return iso.make_mesh((2, 4), ("dp", "tp"))


def over(*entries):
    return NamedSharding(wide(), P(*entries))


def mlp(params, x):
    h = jax.nn.gelu(x @ params["up"])
    h = laid(h, over("dp", "tp"))
    typed = jax.typeof(params["down"]).sharding.mesh.are_all_axes_explicit
    y = jnp.matmul(h, params["down"], out_sharding=over("dp") if typed else None)
    return {"y": y, "hidden": h}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function whose arguments are on 8 devices, from a file."""
    params = {"up": jax.device_put(W, over(None, "tp")), "down": jax.device_put(V, over("tp"))}
    x = jax.device_put(X, over("dp"))
    fn = jax.jit(mlp, out_shardings={"y": over("dp"), "hidden": over("dp", "tp")})
    path = tmp_path_factory.mktemp("jax") / "mlp.onnx"
    made = export_jax(fn, (x,), params=params, path=path)
    loaded = iso.onnx.load(path)
    assert loaded == made
    return loaded, fn(params, x)


class TestAFunction:
    def test_every_layout_is_an_annotation(self, exported):
        found = layout(exported[0])
        assert dict(found.stages[0].mesh.shape) == {"dp": 2, "tp": 4}
        assert found.parameters["up"][0].spec == P(None, "tp")
        assert found.parameters["down"][0].spec == P("tp")
        assert found.inputs["x"].spec == P("dp")
        said = {
            (
                spec.tensor_name,
                tuple((d.axis, d.simple_sharding[0].num_shards) for d in spec.sharded_dim),
            )
            for node in exported[0].graph.node
            for entry in node.device_configurations
            for spec in entry.sharding_spec
            if spec.tensor_name in node.output
        }
        typed = layout(exported[0]).inputs["x"].mesh.are_all_axes_explicit
        assert said == {
            *([("constraint_1", ((0, 2),))] if typed else []),  # an out_sharding= inside
            ("constraint_0", ((0, 2), (1, 4))),
            ("hidden", ((0, 2), (1, 4))),
            ("y", ((0, 2),)),
        }

    def test_runs_on_eight_devices(self, exported):
        run = compile(exported[0])
        found = run(X)
        for name, wanted in exported[1].items():
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5)
        held = run.parameters[0]
        assert {s.data.shape for s in held["up"].addressable_shards} == {(16, 8)}
        assert {s.data.shape for s in held["down"].addressable_shards} == {(8, 16)}
        assert {s.data.shape for s in found["y"].addressable_shards} == {(4, 16)}
        assert {s.data.shape for s in found["hidden"].addressable_shards} == {(4, 8)}

    def test_is_without_error(self, exported):
        onnx.checker.check_model(exported[0], full_check=True)
        assert {finding.severity for finding in validate(exported[0])} <= {"info"}


@pytest.fixture(scope="module")
def ran():
    mesh = iso.make_mesh((2, 2), ("dp", "tp"))
    model = jax_models.gpt(mesh)
    ids = RNG.integers(0, jax_models.TOKENS, (4, jax_models.LENGTH)).astype(np.int32)
    made = export_jax(model, (ids,), mesh, jax_models.GPT_PLAN, stages=jax_models.GPT_STAGES)
    return model, ids, made, compile(made.SerializeToString())


class TestAnNnxModule:
    """A GPT with DP x TP, in two stages, its embedding in both."""

    def test_equal_to_flax(self, ran):
        model, ids, _, run = ran
        with jax.set_mesh(iso.make_mesh((2, 2), ("dp", "tp"))):
            wanted = nnx.jit(lambda model, ids: model(ids))(model, ids)
        np.testing.assert_allclose(run(ids), wanted, rtol=1e-5, atol=1e-5)

    def test_each_device_holds_what_the_plan_says(self, ran):
        model, _, _, run = ran
        mesh = iso.make_mesh((2, 2), ("dp", "tp"))
        planned = jax_models.GPT_PLAN.resolve(model, mesh).shardings
        seen = set()
        for stage, held in enumerate(run.parameters):
            for name in set(held) & set(planned):
                seen.add(name)
                wanted = planned[name].shard_shape(held[name].shape)
                shards = held[name].addressable_shards
                assert {shard.data.shape for shard in shards} == {wanted}, name
                assert {shard.device.id for shard in shards} == set(range(4 * stage, 4 * stage + 4))
        assert seen == {name for name in planned if "dropout" not in name}


def test_an_equinox_and_a_linen_module():
    mesh = wide()
    module = eqx.nn.Linear(16, 8, key=jax.random.key(0))
    made = export_jax(module, (X[0],), mesh, Plan({"weight": P("tp")}, default=P()))
    assert iso.sharding_of(made)["weight"].spec == P("tp")
    np.testing.assert_allclose(compile(made)(X[0]), module(X[0]), rtol=1e-5, atol=1e-5)
    dense = linen.Dense(8)
    variables = jax.jit(dense.init)(jax.random.key(0), X)
    plan = Plan({"params.kernel": P(None, "tp")}, inputs=P("dp"), default=P())
    made = export_jax(dense.apply, (X,), mesh, plan, params=variables)
    assert layout(made).inputs["input_0"].spec == P("dp")
    np.testing.assert_allclose(compile(made)(X), dense.apply(variables, X), rtol=1e-5, atol=1e-5)


def test_a_batch_of_any_size(monkeypatch):
    # JAX has no types for an axis of open size that is split
    monkeypatch.setitem(iso.make_mesh.__kwdefaults__, "axis_types", AxisType.Auto)
    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("batch"), 16), "float32")
    made = export_jax(mlp, (shape,), wide(), Plan(inputs=P("dp")), params={"up": W, "down": V})
    assert Graph(made).shape("x") == ("batch", 16)
    run = compile(made)
    for size in (2, 8):
        wanted = mlp({"up": W, "down": V}, X[:size])["y"]
        np.testing.assert_allclose(run(X[:size])["y"], wanted, rtol=1e-5, atol=1e-5)


def test_layers_in_a_scan():
    stack = np.stack([W[:, :16] * scale for scale in (0.1, 0.2, 0.3)])

    def fn(layers, x):
        def layer(h, w):
            return laid(jnp.tanh(h @ w), over("dp", "tp")), None

        return jax.lax.scan(layer, x, layers)[0]

    made = export_jax(fn, (X,), params=stack)
    assert sum(node.op_type == "Tanh" for node in made.graph.node) == 3
    with jax.set_mesh(wide()):
        wanted = fn(stack, X)
    np.testing.assert_allclose(compile(made)(X), wanted, rtol=1e-5, atol=1e-5)


def test_results_that_are_inputs_constants_or_twice():
    def fn(x, unread):
        y = laid(x * 2, over("dp"))
        return x, jnp.arange(3.0), y, y

    found = compile(export_jax(fn, (X, X)))(X)
    wanted = (X, np.arange(3.0), 2 * X, 2 * X)
    assert list(found) == [f"output_{at}" for at in range(4)]
    for one, other in zip(found.values(), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


class TestRefusals:
    def test_no_layout(self):
        with pytest.raises(ShardingError, match="<lambda> has no shardings, and there is no plan"):
            export_jax(lambda x: x, (X,))

    def test_activations_of_a_plan(self):
        with pytest.raises(PlanError, match="constrain them in the function"):
            export_jax(lambda x: x, (X,), wide(), Plan(activations={"*": P("dp")}))

    def test_a_mesh_that_cannot_say_a_constraint(self):
        fn = lambda x: laid(x, over("dp", "tp"))  # noqa: E731
        with pytest.raises(AnnotationError, match="tensor 'output'"):
            export_jax(fn, (X,), iso.make_mesh((3,), ("a",)))

    def test_axes_left_to_the_compiler(self):
        mesh = iso.make_mesh((2, 4), ("dp", "tp"), axis_types=AxisType.Auto)  # which can be left
        spec = NamedSharding(mesh, P("dp", P.UNCONSTRAINED))
        with pytest.warns(AnnotationWarning, match="output: .* leaves an axis to the compiler"):
            made = export_jax(lambda x: laid(x, spec), (X,))
        assert not any(e.sharding_spec for n in made.graph.node for e in n.device_configurations)

    def test_what_jax2onnx_does_not_know(self):
        def fn(x):
            return jax.pure_callback(np.sin, x, x)

        with pytest.raises(ModelError, match=r"jax2onnx cannot export fn: .*pure_callback"):
            export_jax(fn, (X,), wide())

    def test_sixty_four_bits(self, x64):
        with pytest.raises(ModelError, match="turn it off to export"):
            export_jax(lambda x: x, (X,), wide())

    def test_without_jax2onnx(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "jax2onnx", None)
        with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("onnx-jax"))):
            export_jax(lambda x: x + 1, (X,), wide())

    def test_stages_of_no_weight(self):
        with pytest.raises(AnnotationError, match=r"'nope', .* weights are 'w'"):
            export_jax(
                lambda p, x: x @ p["w"],
                (X,),
                wide(),
                Plan(default=P()),
                params={"w": W},
                stages={"nope": 0},
            )


def test_jax_keeps_its_functions(exported):
    """jax2onnx replaces functions of JAX while it traces."""
    replaced = [
        name
        for module in (jax, jnp, jax.lax, jax.nn)
        for name, value in vars(module).items()
        if "jax2onnx" in getattr(value, "__globals__", {}).get("__name__", "")
    ]
    assert not replaced
    assert jnp.cumsum(jnp.ones(3), 0).tolist() == [1, 2, 3]
