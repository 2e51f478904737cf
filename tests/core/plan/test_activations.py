"""Activations: by module name, several arrays, logical axes, products, every fault named."""

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Activation, Linear, Plan, PlanError

U = P.UNCONSTRAINED


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("dp", "tp"))


def specs(plan, module, side, shapes, mesh):
    found = plan.activation_for(module).resolve(side, shapes, mesh)
    return {path: sharding.spec for path, sharding in found.items()}


def test_one_spec_is_for_the_first_array(mesh):
    plan = Plan(activations={"*.mlp": P("dp", None, "tp")})
    assert specs(plan, "0.mlp", "output", {"": (4, 8, 8)}, mesh) == {"": P("dp", None, "tp")}
    two = {"0": (4, 8, 8), "1": (4,)}
    assert specs(plan, "0.mlp", "output", two, mesh) == {"0": P("dp", None, "tp")}
    assert specs(plan, "0.mlp", "input", two, mesh) == {}
    assert plan.activation_for("0.attn") is None


def test_dots_are_the_axes_that_are_left_to_the_compiler(mesh):
    def found(spec, shape=(4, 8, 8)):
        plan = Plan(activations={"m": spec})
        return specs(plan, "m", "output", {"": shape}, mesh)[""]

    assert found(("dp", ...)) == P("dp", U, U)
    assert found((..., "tp")) == P(U, U, "tp")
    assert found(P("dp", ..., "tp")) == P("dp", U, "tp")
    assert found(("dp", ..., "tp"), (4, 8)) == P("dp", "tp")
    with pytest.raises(PlanError, match=r"names 2 axes, and the shape \(4,\) has 1"):
        found(("dp", ..., "tp"), (4,))
    with pytest.raises(PlanError, match=r"'...' is repeated"):
        found((..., "dp", ...))


def test_batch_and_sequence_between_the_layers(mesh):
    plan = Plan.batch_activations("dp") * Plan.sequence_parallel("tp")
    shapes = {"": (4, 8, 8)}
    assert specs(plan, "h.0.ln_1", "output", shapes, mesh) == {"": P("dp", "tp", U)}
    assert specs(plan, "h.0.mlp.c_proj", "output", shapes, mesh) == {"": P("dp", "tp", U)}
    assert specs(plan, "h.0.mlp.c_fc", "output", shapes, mesh) == {"": P("dp", U, "tp")}
    assert plan.activation_for("wpe") is None and plan.activation_for("h.0") is None
    only = Plan.batch_activations("dp", modules="h.*")
    assert specs(only, "h.0", "output", shapes, mesh) == {"": P("dp", U, U)}
    assert only.activation_for("wte") is None


def test_a_mapping_is_for_the_arrays_it_names(mesh):
    said = Activation(input={"0": P("dp"), "mask": None}, output={"hidden": ["dp", None, "tp"]})
    plan = Plan(activations=[("attn", said)])
    shapes = {"0": (4, 8, 8), "1": (3,), "mask": (4, 8)}
    assert specs(plan, "attn", "input", shapes, mesh) == {"0": P("dp"), "mask": P()}
    assert specs(plan, "attn", "output", {"hidden": (4, 8, 8), "cache.0": (1,)}, mesh) == {
        "hidden": P("dp", None, "tp")
    }


def test_logical_axes_and_open_axes(mesh):
    plan = Plan(activations={"*": ("batch", U, "mlp")}, axes={"batch": ("dp", "pod"), "mlp": "tp"})
    assert specs(plan, "m", "output", {"": (4, 5, 8)}, mesh) == {"": P("dp", U, "tp")}
    trailing = Plan(activations={"*": (None, U, None)})
    assert specs(trailing, "m", "output", {"": (4, 5, 8)}, mesh) == {"": P(None, U)}


def test_a_product_merges(mesh):
    plan = Plan.sequence_parallel("tp") * Plan(activations={"*": P("dp", None, U)})
    assert specs(plan, "h.0.ln_1", "output", {"": (4, 8, 6)}, mesh) == {"": P("dp", "tp", U)}
    assert specs(plan, "h.0.mlp", "output", {"": (4, 8, 6)}, mesh) == {"": P("dp", None, U)}
    assert plan.activation_for("h.0.ln_1").rule == "sequence * *"
    clash = Plan.sequence_parallel("tp") * Plan(activations={"*": P("tp")})
    with pytest.raises(PlanError, match=r"mesh axis 'tp' splits axis 0 .* and axis 1"):
        specs(clash, "norm", "output", {"": (4, 8, 6)}, mesh)


def test_sequence_parallel_knows_norms(mesh):
    for name in ("norm", "h.0.ln_1", "model.norm", "l.0.input_layernorm"):
        found = specs(Plan.sequence_parallel("tp"), name, "output", {"": (4, 8, 6)}, mesh)
        assert found == {"": P(U, "tp", U)}, name
    assert Plan.sequence_parallel("tp").activation_for("h.0.mlp") is None


def test_every_fault_is_named(mesh):
    said = Activation(output={"0": P("tp"), "1": P("modle"), "5": P(), "2": P("dp")})
    with pytest.raises(PlanError) as caught:
        specs(Plan(activations={"m": said}), "m", "output", {"0": (6,), "1": (8,), "2": (8,)}, mesh)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the output of module 'm' cannot be sharded:"
    assert "there is no array at '5'; the arrays are at '0', '1', '2'" in lines[1]
    assert "m, output 1: " in lines[2] and "'modle'" in lines[2]
    assert "m, output 0: shape (6,) does not split evenly" in lines[3]
    assert len(lines) == 4
    with pytest.raises(PlanError, match="no array to shard"):
        specs(Plan(activations={"m": P("dp")}), "m", "output", {}, mesh)


def test_what_is_refused():
    with pytest.raises(PlanError, match="needs a spec for the output or for the input"):
        Activation()
    with pytest.raises(PlanError, match="is a rule for parameters; give an activation a spec"):
        Plan(activations={"m": Linear(out="tp")})
    with pytest.raises(PlanError, match="'re:\\(' is not a regular expression"):
        Plan(activations={"re:(": None})


def test_activations_are_values():
    plan = Plan(activations={"a": ["dp", None], "b": Activation(input={"0": P("dp")})})
    assert eval(repr(plan)) == plan
    assert hash(plan) == hash(eval(repr(plan)))
    assert plan.activation_for("a") == plan.activation_for("a")
    assert hash(plan.activation_for("b")) == hash(plan.activation_for("b"))


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()),
        nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))]),
    ],
    ids=["torch", "flax"],
)
def test_the_table_of_a_model_has_its_activations(mesh, model):
    said = Activation(output=P("dp"), input={"0": None})
    plan = Plan({"0.*": Linear(out="tp")}, activations={"re:(?#first)0": said, "7": P()})
    found = plan.resolve(model, mesh)
    rows = [(row.side, row.spec, row.rule) for row in found.activations]
    assert rows == [("input", "{'0': None}", "first"), ("output", "P('dp',)", "first")]
    assert "7 (activation)" in found.unused
    assert "first" in str(found)
    with pytest.raises(PlanError, match=r"rule '7 \(activation\)' decides nothing"):
        plan.resolve(model, mesh, strict=True)


def test_the_shardings_constrain_inside_jit(mesh):
    plan = Plan(activations={"norm": (U, "tp")})

    @jax.jit
    def f(x):
        y = x * 2
        (sharding,) = plan.activation_for("norm").resolve("output", {"": y.shape}, mesh).values()
        return jax.lax.with_sharding_constraint(y, sharding)

    assert f(jnp.ones((4, 8))).sharding.spec[1] == "tp"
