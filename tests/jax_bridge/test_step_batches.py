"""Batches of a training step lie as the `inputs` of its plan say, whatever they were before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.jax_bridge import train_step
from tests.jax_bridge.compiling import counting
from tests.jax_bridge.models import AUTO, EXPLICIT, mesh_of

ROWS = iso.Plan({"*": None}, inputs=P("data"))
BY_NAME = iso.Plan({"*": None}, inputs={"tokens": P("data", "model"), "*": None})


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


class Seen:
    """The layouts that a loss was given, by the compiler's own word."""

    def __init__(self):
        self.specs = []

    def __call__(self, params, *batch):
        for leaf in jax.tree.leaves(batch):
            jax.debug.inspect_array_sharding(leaf, callback=self._note)
        return params["w"].sum() * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(batch))

    def _note(self, sharding):
        self.specs.append(sharding)

    def splits(self, shape):
        return [sharding.shard_shape(shape) for sharding in self.specs]


def params():
    return {"w": jnp.ones(4)}


def step_of(loss, mesh, plan, **options):
    step = train_step(loss, optax.sgd(0.1), mesh, plan, **options)
    return step, step.init(params)


FORMS = {
    "numpy": lambda x, mesh: x,
    "one device": lambda x, mesh: jnp.asarray(x),
    "replicated": lambda x, mesh: iso.shard(x, mesh, P()),
    "by another axis": lambda x, mesh: iso.shard(x, mesh, P(None, "model")),
    "as planned": lambda x, mesh: iso.shard(x, mesh, P("data")),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_lies_as_the_plan_says(mesh, form):
    seen = Seen()
    step, state = step_of(seen, mesh, ROWS)
    step(state, FORMS[form](np.ones((8, 4), np.float32), mesh))
    assert seen.splits((8, 4)) == [(4, 4)]


@pytest.mark.parametrize("plan", [iso.Plan.fsdp("data"), iso.Plan.data_parallel("data")])
def test_ready_made_plans(mesh, plan):
    seen = Seen()
    step, state = step_of(seen, mesh, plan)
    step(state, {"x": np.ones((8, 4), np.float32)}, np.ones((4, 4), np.float32))
    assert [s.shard_shape((8, 4)) for s in seen.specs] == [(4, 4), (4, 4)]


def test_names_single_numbers_and_keys(mesh):
    seen = Seen()

    def loss(params, batch):
        noise = jax.random.normal(batch["key"], (4,)).sum()
        return seen(params, batch["tokens"], batch["mask"]) + noise * batch["scale"] * batch["rate"]

    step, state = step_of(loss, mesh, BY_NAME)
    batch = {
        "tokens": np.ones((8, 4), np.float32),
        "mask": np.ones((7, 3), np.float32),
        "key": jax.random.key(0),
        "scale": np.float32(2),
        "rate": 0.5,
    }
    with counting() as compiled:
        state, _ = step(state, batch)
        once = compiled()
        step(state, batch)
        assert compiled() == once
    assert seen.specs[0].shard_shape((8, 4)) == (4, 1)
    assert seen.specs[1].shard_shape((7, 3)) == (7, 3)


def test_a_plan_without_inputs_leaves_batches_alone(mesh):
    seen = Seen()
    step, state = step_of(seen, mesh, iso.Plan({"*": None}))
    step(state, iso.shard(np.ones((8, 4), np.float32), mesh, P("model")))
    assert seen.splits((8, 4)) == [(2, 4)]


@pytest.mark.parametrize("explicit", [False, True])
def test_explicit_axes_and_steps_in_a_program(explicit):
    mesh = mesh_of(EXPLICIT, EXPLICIT)
    plan = iso.Plan({"*": None}, inputs=P("data"))

    def loss(params, x):
        if explicit:
            assert str(jax.typeof(x)) == "float32[8@data,4]"
        return (x * params["w"]).sum()

    step, state = step_of(loss, mesh, plan, explicit=explicit, donate=False)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    _, want = step(state, x)

    @jax.jit
    def twice(state, x):
        return jax.lax.scan(lambda state, x: step(state, x), state, jnp.stack([x, x]))[1]

    np.testing.assert_allclose(want, x.sum())
    np.testing.assert_allclose(twice(state, x)[0], want)


def test_lowered_for_shapes(mesh):
    step, state = step_of(Seen(), mesh, ROWS)
    lowered = step.lower(state, jax.ShapeDtypeStruct((8, 4), "float32")).as_text()
    assert '[{"data"}' in lowered


def test_rows_that_do_not_divide(mesh):
    step, state = step_of(Seen(), mesh, ROWS, donate=False)
    x = np.ones((7, 4), np.float32)
    message = (
        r"a batch does not split evenly: batch.x has 7 rows for 2 shards\. "
        r"Choose a batch size that does.*multiple.*uneven=\"pad\""
        r".*iso.data.loader\(.., last=\"pad\", mask=\"real\"\)"
    )
    with pytest.raises(iso.errors.UnevenError, match=message):
        step(state, {"x": x, "y": np.ones(8, np.float32)})
    with pytest.raises(iso.errors.UnevenError, match=r"batch\.1 has 7 rows for 2 shards"):
        step(state, np.ones((8, 4), np.float32), x)
    with pytest.raises(iso.errors.UnevenError, match="batch has 7 rows"):
        step(state, jnp.asarray(x))
    columns = iso.Plan({"*": None}, inputs=P(None, "model"))
    step, state = step_of(Seen(), mesh, columns)
    with pytest.raises(iso.ShardingError, match=r"batch: .*axis 1"):
        step(state, np.ones((8, 3), np.float32))


def test_rows_are_padded_where_told_to(mesh):
    def loss(params, batch):
        return (params["w"].sum() * batch["x"]).sum()

    step, state = step_of(loss, mesh, ROWS, uneven="pad", donate=False)
    rows = np.arange(8, dtype=np.float32)
    _, full = step(state, {"x": rows})
    with counting() as compiled:
        _, padded = step(state, {"x": rows[:7]})
        assert compiled() == 0
    assert (float(full), float(padded)) == (4 * 28, 4 * 21)  # row 0 once more
    with pytest.raises(iso.ShardingError, match="on devices cannot be padded"):
        step(state, {"x": jnp.ones(7)})


def test_options_that_cannot_be(mesh):
    with pytest.raises(iso.ShardingError, match="uneven is 'error' or 'pad', not 'drop'"):
        train_step(Seen(), optax.sgd(0.1), mesh, ROWS, uneven="drop")
    with pytest.raises(iso.ShardingError, match=r"uneven=\"pad\".*the plan has no inputs"):
        train_step(Seen(), optax.sgd(0.1), mesh, P(), uneven="pad")


def test_rules_for_inputs_that_no_array_has(mesh):
    plan = iso.Plan({"*": None}, inputs={"tokns": P("data"), "*": None})
    step, state = step_of(Seen(), mesh, plan)
    with pytest.warns(iso.errors.UnusedRuleWarning, match=r"'tokns'.*nearest is 'tokens'"):
        step(state, {"tokens": np.ones((8, 4), np.float32)})


def test_the_source_may_reuse_its_memory():
    mesh = mesh_of(AUTO, AUTO)
    step, state = step_of(Seen(), mesh, ROWS)
    x = np.ones((1 << 10, 64), np.float32)
    state, loss = step(state, x)
    x[:] = 0
    assert float(loss) == 4 * (1 << 16)
