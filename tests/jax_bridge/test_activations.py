"""Activations constrained by module name, in NNX and in Linen, without editing the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.plan.activations import Activation
from isoshard.jax_bridge import constrain_activations
from tests.jax_bridge.compiling import counting

SPEC = P("data", "model")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x, *, scale=1.0):
        hidden = nnx.relu(self.up(x))
        return scale * self.down(hidden), {"hidden": hidden}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x, aux = block(x, scale=2.0)
        return x, aux


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, name="down")(linen.relu(linen.Dense(16, name="up")(x)))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        return LinenBlock(name="b1")(LinenBlock(name="b0")(x))


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


@pytest.fixture
def model():
    return Model(nnx.Rngs(0))


X = jnp.linspace(-1, 1, 32).reshape(4, 8)


def constraints(function, *args):
    """The specs that are asked for inside of a function, in order."""
    found = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "sharding_constraint":
                found.append(equation.params["sharding"].spec)
            for inner in jax.tree.leaves(list(equation.params.values())):
                if hasattr(inner, "jaxpr"):
                    look(inner.jaxpr)

    look(jax.make_jaxpr(function)(*args).jaxpr)
    return found


class TestNNX:
    def test_outputs_by_name(self, model, mesh):
        graph, state = nnx.split(model)

        def run(state, x):
            model = nnx.merge(graph, state)
            with constrain_activations(mesh, {"blocks.1.up": SPEC}, model) as seen:
                result = model(x)
            assert seen.modules == {"blocks.1.up": "blocks.1.up"}
            return result

        assert constraints(run, state, X) == [SPEC]
        np.testing.assert_allclose(jax.jit(run)(state, X)[0], model(X)[0], rtol=1e-5, atol=1e-6)

    def test_inputs_paths_and_keywords(self, model, mesh):
        said = Activation(
            input={"0": P("data"), "scale": P()},
            output={"0": P(None, "model"), "1.hidden": P("model")},
        )

        def run(x, scale):
            with constrain_activations(mesh, {"": said}, model.blocks[0]):
                return model.blocks[0](x, scale=scale)

        found = constraints(run, X, jnp.float32(2))
        assert found == [P("data"), P(), P(None, "model"), P("model")]

    def test_outside_jit_values_move(self, model, mesh):
        with constrain_activations(mesh, iso.Plan(activations={"blocks.*.up": SPEC}), model):
            got = model.blocks[0].up(X)
        assert got.sharding == NamedSharding(mesh, SPEC)
        assert not isinstance(model.blocks[0].up(X).sharding, NamedSharding)

    def test_classes_and_other_modules_are_left_alone(self, model, mesh):
        other, call, kind = Model(nnx.Rngs(1)), nnx.Linear.__call__, type(model.blocks[0].up)
        with constrain_activations(mesh, {"blocks.0.up": SPEC}, model):
            inside = model.blocks[0].up
            assert isinstance(inside, nnx.Linear)
            assert (type(inside).__name__, type(inside) is kind) == ("Linear", False)
            assert type(model.blocks[1].up) is kind
            assert nnx.Linear.__call__ is call
            assert type(other.blocks[0].up) is kind
        assert type(model.blocks[0].up) is kind
        with pytest.raises(ZeroDivisionError):
            with constrain_activations(mesh, {"blocks.0.up": SPEC}, model):
                raise ZeroDivisionError
        assert type(model.blocks[0].up) is kind

    def test_nnx_transformations_inside(self, model, mesh):
        @nnx.jit
        def grads(model, x):
            with constrain_activations(mesh, {"blocks.?.up": SPEC}, model):
                return nnx.grad(lambda model: (model(x)[0] ** 2).sum())(model)

        want = nnx.jit(nnx.grad(lambda model: (model(X)[0] ** 2).sum()))(model)
        iso.shard(model, mesh, None)
        with counting() as compiled:
            got = grads(model, X)
            first = compiled()
            grads(model, X)
        assert first >= 1
        assert compiled() == first
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_what_is_no_nnx_module(self, mesh):
        with pytest.raises(TypeError, match=r"NNX modules, not in a dict; leave Linen modules"):
            with constrain_activations(mesh, {"a": SPEC}, {}):
                pass


class TestLinen:
    def test_outputs_by_name(self, mesh):
        model = LinenModel()
        variables = jax.jit(model.init)(jax.random.key(0), X)

        def run(variables, x):
            rules = {"b?.up": SPEC, "": P("data"), "b1": Activation(input=P(None, "model"))}
            with constrain_activations(mesh, rules) as seen:
                result = model.apply(variables, x)
            assert seen.modules == {"": "", "b0.up": "b?.up", "b1.up": "b?.up", "b1": "b1"}
            assert "b0.down" in seen.others
            return result

        assert constraints(run, variables, X) == [SPEC, P(None, "model"), SPEC, P("data")]
        want = jax.jit(model.apply)(variables, X)
        np.testing.assert_allclose(jax.jit(run)(variables, X), want, rtol=1e-5)


class TestRefusals:
    def test_patterns_that_match_nothing(self, model, mesh):
        with pytest.raises(iso.PlanError, match=r"no pattern.*'blocks\.0\.down', 'blocks"):
            with constrain_activations(mesh, {"layers.*": SPEC}, model):
                model(X)
        linen_model = LinenModel()
        variables = linen_model.init(jax.random.key(0), X)
        with pytest.raises(iso.PlanError, match=r"no pattern.*'b0\.up'.*'' is the model itself"):
            with constrain_activations(mesh, {"layers.*": SPEC}):
                linen_model.apply(variables, X)

    def test_a_spec_that_does_not_fit(self, model, mesh):
        with pytest.raises(iso.PlanError, match=r"(?s)rule 'blocks\.0\.up': .*is called 'z'"):
            with constrain_activations(mesh, {"blocks.0.up": P("z")}, model):
                model(X)

    def test_a_plan_without_activations_does_nothing(self, model, mesh):
        with constrain_activations(mesh, iso.Plan({"*": P("z")}), model) as seen:
            model(X)
        assert (seen.modules, seen.others) == ({}, {})
