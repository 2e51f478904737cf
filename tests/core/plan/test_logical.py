"""Logical axes: first fit as Flax does it, what it does not do, names that leaves carry."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Linear, Plan, PlanError
from isoshard.core.plan.logical import AxisTable

MAXTEXT = [
    ("activation_batch", ("data", "fsdp")),
    ("vocab", "tensor"),
    ("mlp", "tensor"),
    ("heads", "tensor"),
    ("embed", "fsdp"),
    ("embed", "tensor"),
    ("norm", None),
]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize(
    "names",
    [
        ("embed", "mlp"),
        ("mlp", "embed"),
        ("vocab", "embed"),
        ("embed", "heads", None),
        ("activation_batch", None, "embed"),
        ("norm",),
        ("heads", "mlp"),
        ("activation_batch", "embed", "mlp"),
        (None, None),
    ],
)
def test_the_order_of_the_rules_decides_as_in_flax(mesh, names):
    plan = Plan.from_logical_axis_rules(MAXTEXT)
    expected = nn.logical_to_mesh_axes(names, MAXTEXT)
    found = Plan({"w": names}, axes=MAXTEXT).spec_for("w", (8,) * len(names), mesh)
    canonical = iso.sharding.normalize_spec(expected, mesh, len(names))
    assert found == canonical
    assert plan.axes == AxisTable(MAXTEXT)


def test_rules_write_logical_names_where_mesh_axes_stand(mesh):
    plan = Plan({"up.*": Linear(out="mlp", into="fsdp")}, axes={"mlp": "tensor"})
    assert plan.spec_for("up.weight", (8, 4), mesh) == P("tensor", "fsdp")
    assert plan.spec_for("up.kernel", (4, 8), mesh) == P("fsdp", "tensor")
    grouped = Plan({"w": (("mlp", "data"), None)}, axes={"mlp": "tensor"})
    assert grouped.spec_for("w", (8, 4), mesh) == P(("tensor", "data"))


def test_axes_that_the_mesh_has_not_are_passed_over():
    table = [("embed", ("pod", "fsdp")), ("mlp", "tensor"), ("mlp", "fsdp2")]
    plan = Plan({"w": ("embed", "mlp")}, axes=table)
    assert plan.spec_for("w", (8, 8), make_mesh((8,), ("fsdp",))) == P("fsdp")
    assert plan.spec_for("w", (8, 8), make_mesh((1, 8), ("tensor", "fsdp2"))) == P(None, "tensor")


def test_a_large_leaf_of_which_nothing_is_split_is_refused():
    mesh = make_mesh((8,), ("dp",))
    plan = Plan({"*": ("embed", None)}, axes={"embed": "fsdp"})
    assert plan.spec_for("small", (8, 8), mesh) == P()
    with pytest.raises(PlanError) as caught:
        plan.resolve({"a": (1024, 1024), "b": (2048, 1024), "c": (8, 8)}, mesh)
    message = str(caught.value)
    assert "the specs of 2 leaves do not fit" in message
    assert "a: shape (1024, 1024), 4.0 MiB, would be replicated" in message
    assert "b: shape" in message and "axis 0 ('embed') is not split: 'fsdp' is not on" in message
    on_purpose = Plan({"*": ("embed",)}, axes=[("embed", "fsdp"), ("embed", None)])
    assert on_purpose.spec_for("a", (1024, 1024), mesh) == P()
    assert plan.spec_for("a", (1024, 1024), make_mesh((1,), ("dp",))) == P()


def test_what_does_not_divide_gives_way_or_is_refused(mesh):
    plan = Plan({"*": ("vocab", "embed")}, axes={"vocab": ("fsdp", "tensor"), "embed": None})
    with pytest.raises(
        PlanError, match=r"(?s)2 leaves do not fit.*'vocab'\) has size 6, .*4 shards.*y: shape"
    ):
        plan.resolve({"x": (6, 8), "y": (10, 8), "z": (8, 8)}, mesh)
    second = Plan({"*": ("vocab",)}, axes=[("vocab", ("fsdp", "tensor")), ("vocab", "tensor")])
    assert second.spec_for("x", (6, 8), mesh) == P("tensor")


def test_notes_are_in_the_table(mesh):
    plan = Plan({"w": ("mlp", "heads")}, axes={"mlp": "tensor", "heads": "tensor"})
    resolved = plan.resolve({"w": (8, 8)}, mesh)
    assert resolved.specs == {"w": P("tensor")}
    assert "w: axis 1 ('heads') is not split: 'tensor' splits axis 0" in str(resolved)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("emebd", "mlp"), r"'emebd' is neither a logical axis of the plan \('embed', 'mlp'\)"),
        (("embed", "embed"), r"'embed' is repeated in \('embed', 'embed'\)"),
        (("embed", "mlp", None), "3 entries for a tensor of rank 2"),
        (("embed", "fsdp"), None),
    ],
)
def test_names_that_are_wrong(mesh, spec, message):
    plan = Plan({"w": spec}, axes={"embed": "fsdp", "mlp": "tensor"})
    if message is None:  # a literal mesh axis comes first, and the logical one gives way
        assert plan.spec_for("w", (8, 8), mesh) == P(None, "fsdp")
        return
    with pytest.raises(PlanError, match=message):
        plan.spec_for("w", (8, 8), mesh)


@pytest.mark.parametrize("axes", [{"embed": 3}, [("embed",)], [(3, "x")], {"embed": ("x", None)}])
def test_malformed_tables(axes):
    with pytest.raises(PlanError, match="axes are pairs of a logical name and a mesh axis"):
        Plan(axes=axes)


def test_a_plan_with_axes_is_a_value():
    plan = Plan({"w": ("embed",)}, axes=[("embed", "x"), ("embed", None)])
    assert eval(repr(plan)) == plan
    assert hash(plan) == hash(eval(repr(plan)))
    assert plan != Plan({"w": ("embed",)})


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        def init(*names):
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)

        x = nn.Dense(32, kernel_init=init("embed", "mlp"), name="up")(x)
        return nn.Dense(16, kernel_init=init("mlp", "embed"), name="down")(x)


def test_linen_boxes_are_laid_out_by_their_names(mesh):
    variables = jax.jit(Mlp().init)(jax.random.key(0), jnp.ones((2, 16)))
    resolved = Plan.from_logical_axis_rules(MAXTEXT).resolve(variables, mesh)
    assert resolved.specs["params.up.kernel"] == P("fsdp", "tensor")
    assert resolved.specs["params.down.kernel"] == P("tensor", "fsdp")
    assert resolved.specs["params.up.bias"] == P()
    rules = {leaf.name: leaf.rule for leaf in resolved.leaves}
    assert rules["params.up.kernel"] == "(its own axis names)"
    assert rules["params.up.bias"] == "(default)"
    theirs = nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh, MAXTEXT)
    placed = iso.shard(variables, mesh, Plan.from_logical_axis_rules(MAXTEXT))
    assert placed["params"]["up"]["kernel"].value.sharding.spec == P("fsdp", "tensor")
    ours = resolved.shardings_like(nn.meta.unbox(variables))
    assert ours["params"]["up"]["kernel"] == theirs["params"]["up"]["kernel"]


def make_nnx(*names):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, eager_sharding=False)
    return nnx.Linear(16, 32, kernel_init=init, rngs=nnx.Rngs(0))


def test_nnx_variables_are_laid_out_by_their_names(mesh):
    plan = Plan.from_logical_axis_rules(MAXTEXT)
    model = make_nnx("embed", "mlp")
    expected = {"bias": P(), "kernel": P("fsdp", "tensor")}
    assert plan.resolve(model, mesh).specs == expected
    assert plan.resolve(nnx.state(model), mesh).specs == expected
    assert Plan().resolve(make_nnx(None, "tensor"), mesh).specs["kernel"] == P(None, "tensor")
    assert Plan({"kernel": None}).resolve(model, mesh).specs["kernel"] == P()
    iso.shard(model, mesh, plan)
    assert iso.sharding_of(model)["kernel"].spec == P("fsdp", "tensor")


def test_a_name_that_no_rule_knows_is_named(mesh):
    plan = Plan.from_logical_axis_rules(MAXTEXT)
    with pytest.raises(PlanError, match=r"kernel: 'emb', 'mpl' are neither .*\[rule '\(its own"):
        plan.resolve(make_nnx("emb", "mpl"), mesh)
    assert Plan().resolve(make_nnx("emb", "mpl"), mesh).leaves[1].rule == "(small)"
    with pytest.raises(PlanError, match=r"its axis names are \('emb', 'mpl'\), and axes= is empty"):
        Plan(replicate_below=8).resolve(make_nnx("emb", "mpl"), mesh)
