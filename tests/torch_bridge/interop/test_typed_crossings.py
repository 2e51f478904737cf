"""`jax_function` on meshes with Explicit axes: types go in and come out, and gradients do."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import ShardingError, SpecError, UnevenError
from tests.jax_faults import OF_JAX_9, erf_in_shard_map, named_axis_of_vmap
from tests.torch_bridge.interop.types_of_arrays import (
    AMBIENT,
    close,
    data,
    grid,
    on,
    type_of,
    typed,
)

__all__ = ["typed"]

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


SPECS = {"up.weight": ("y",), "up.bias": ("y",), "down.weight": (None, "y"), "down.bias": ()}
TYPES = {
    "up.weight": "f32[8@y,4]",
    "up.bias": "f32[8@y]",
    "down.weight": "f32[4,8@y]",
    "down.bias": "f32[4]",
}


def loss(f: Any, params: Any, x: Any) -> Any:
    return (f(params, x) ** 2).sum()


@pytest.fixture
def net(typed):
    """The net's function, parameters and input on the mesh."""
    f = iso.jax_function(Net())
    params = {name: on(typed, array, *SPECS[name]) for name, array in f.params.items()}
    return f, params, on(typed, data(8, 4).numpy(), "x")


@functools.cache
def wanted():
    """The loss and its gradients, of one device."""
    f, x = iso.jax_function(Net()), data(8, 4).numpy()
    return jax.jit(jax.value_and_grad(lambda p, x: loss(f, p, x), (0, 1)))(f.params, x)


TRANSFORMED = {
    "eagerly": lambda f, p, x: f(p, x),
    "checkpoint": lambda f, p, x: jax.jit(jax.checkpoint(f))(p, x),
    "vmap in jit": lambda f, p, x: jax.jit(jax.vmap(f, (None, 0)))(p, x),
    "scan": lambda f, p, x: jax.jit(
        lambda p, x: jax.lax.scan(lambda c, _: (f(p, c), None), x, None, 3)[0]
    )(p, x),
}


@pytest.mark.parametrize(
    ("typed", "way"),
    [*zip(["alone", "under set_mesh"] * 2, TRANSFORMED, strict=True)],
    indirect=["typed"],
)
def test_the_compilers_layout_is_the_results_type(net, way):
    f, params, x = net
    got = TRANSFORMED[way](f, params, x)
    assert type_of(got) == "f32[8@x,4]"
    module, want = Net(), data(8, 4)
    for _ in range(3 if way == "scan" else 1):
        want = module(want).detach()
    close(got, want)


def spread_loss(f: Any, params: Any, x: Any) -> Any:
    """The loss by `jax.shard_map`, of whole parameters."""
    mesh = jax.typeof(x).sharding.mesh
    mapped = jax.shard_map(
        lambda params, x: jax.lax.psum(loss(f, params, x), "x"),
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    return mapped(jax.sharding.reshard(params, NamedSharding(mesh, P())), x)


LOSSES = {
    "jit": loss,
    "checkpoint": lambda f, p, x: jax.checkpoint(lambda p, x: loss(f, p, x))(p, x),
    "vmap": lambda f, p, x: jax.vmap(lambda x: loss(f, p, x))(x).sum(),
    "shard_map": spread_loss,
}


@pytest.mark.parametrize(
    ("typed", "way"),
    [
        ("under set_mesh", "jit"),
        ("alone", "checkpoint"),
        ("under set_mesh", "vmap"),
        pytest.param("alone", "shard_map", marks=erf_in_shard_map),
    ],
    indirect=["typed"],
)
def test_gradients_have_the_types_of_what_they_are_of(net, way):
    f, params, x = net
    step = jax.jit(jax.value_and_grad(lambda p, x: LOSSES[way](f, p, x), (0, 1)))
    value, (of_params, of_x) = step(params, x)
    assert {name: type_of(array) for name, array in of_params.items()} == TYPES
    assert type_of(of_x) == "f32[8@x,4]" and type_of(value) == "f32[]"
    jax.tree.map(close, (value, (of_params, of_x)), wanted())


@pytest.mark.parametrize("typed", ["under set_mesh"], indirect=True)
def test_an_eager_gradient_under_set_mesh(typed):
    f = iso.jax_function(torch.sin)
    found = jax.grad(lambda x: f(x).sum())(on(typed, data(8, 4).numpy(), "x"))
    assert type_of(found) == "f32[8@x,4]"
    close(found, data(8, 4).cos())


@pytest.mark.parametrize(
    ("typed", "jitted"), [("alone", True), ("under set_mesh", False)], indirect=["typed"]
)
def test_out_sharding_says_the_types_of_results(typed, jitted):
    def pair(x: torch.Tensor) -> Any:
        return {"sum": x.sum(0), "both": (x + 1, x.T)}

    x = on(typed, data(8, 4).numpy(), "x")
    cases = [
        (P(None), {"sum": "f32[4]", "both": ("f32[8,4]", "f32[4,8]")}),
        (
            {"sum": P("y"), "both": (NamedSharding(typed, P("x", "y")), None)},
            {"sum": "f32[4@y]", "both": ("f32[8@x,4@y]", "f32[4,8@x]")},
        ),
    ]
    for declared, want in cases:
        f = iso.jax_function(pair, out_sharding=declared)
        got = (jax.jit(f) if jitted else f)(x)
        assert jax.tree.map(type_of, got) == want
        jax.tree.map(close, got, pair(data(8, 4)))
    untyped = NamedSharding(grid(AUTO, AUTO), P("x"))
    got = iso.jax_function(lambda x: x + 1, out_sharding=untyped)(x)
    assert got.sharding == untyped  # what is declared is what comes


def test_what_out_sharding_cannot_say_is_refused(typed):
    x = on(typed, np.ones((6, 4), np.float32))
    with pytest.raises(UnevenError, match=r"result of double: .*6"):
        jax.jit(iso.jax_function(double, out_sharding=P("y")))(x)
    with pytest.raises(SpecError, match="no mesh axis is called 'z'"):
        iso.jax_function(double, out_sharding=P("z"))(x)
    with pytest.raises(ShardingError, match=r"out_sharding of double is .*nested as .*a tree"):
        iso.jax_function(double, out_sharding=(P(), P()))(x)


def double(x: Any) -> Any:
    return 2 * x


def test_out_sharding_takes_results_to_a_mesh_that_no_argument_is_on():
    mesh = jax.make_mesh((8,), ("z",))
    f = iso.jax_function(lambda x: x + 1, out_sharding=NamedSharding(mesh, P("z")))
    assert type_of(f(np.ones(8, np.float32))) == "f32[8@z]"
    assert type_of(jax.jit(f)(jnp.ones(8))) == "f32[8@z]"
    with pytest.raises(ShardingError, match=r"jax\.set_mesh has set none.*out_sharding"):
        iso.jax_function(lambda x: x + 1, out_sharding=P("z"))(jnp.ones(8))


@pytest.mark.parametrize(
    ("typed", "jitted"), [("alone", False), ("under set_mesh", True)], indirect=["typed"]
)
def test_marks_in_the_torch_code_are_types(typed, jitted):
    same = xs.Mesh(range(8), (2, 4), ("x", "y"))  # of torch_xla's kind, its axes Auto

    def marked(x: torch.Tensor) -> Any:
        one, two, three = x + 1, x * 2, x * 3
        xs.mark_sharding(one, typed, P("y", "x"))
        xs.mark_sharding(two, same, (None, 1))
        return one, two, three

    f = iso.jax_function(marked)
    got = (jax.jit(f) if jitted else f)(on(typed, data(8, 4).numpy(), "x"))
    assert [type_of(one) for one in got] == ["f32[8@y,4@x]", "f32[8,4@y]", "f32[8@x,4]"]


def test_a_plan_of_activations_types_results(typed):
    model = Net()
    f = iso.jax_function(model)
    x = on(typed, data(8, 4).numpy(), "x")
    with xs.constrain_activations(model, typed, iso.Plan(activations={"down": P("x", "y")})):
        assert type_of(jax.jit(f)(f.params, x)) == "f32[8@x,4@y]"
    assert type_of(jax.jit(lambda p, x: f(p, x))(f.params, x)) == "f32[8@x,4]"


@AMBIENT
def test_new_buffers_lie_as_the_old_ones(typed):
    f = iso.jax_function(torch.nn.BatchNorm1d(4))
    buffers = {name: on(typed, array, *["y"][: array.ndim]) for name, array in f.buffers.items()}
    x = on(typed, data(3, 8, 4).numpy(), None, "x")

    def body(buffers: Any, x: Any) -> Any:
        y, buffers = f.with_buffers(f.parameters, buffers, x)
        return buffers, y

    jitted = jax.sharding.get_abstract_mesh().empty
    scan = jax.jit(jax.lax.scan, static_argnums=0) if jitted else jax.lax.scan
    last, ys = scan(body, buffers, x)
    assert type_of(last["running_mean"]) == "f32[4@y]"
    assert type_of(ys) == "f32[3,8@x,4@y]"
    if not jitted:
        _, eager = f.with_buffers(f.parameters, buffers, on(typed, data(8, 4).numpy(), "x", "y"))
        assert type_of(eager["running_mean"]) == "f32[4@y]"


def test_arguments_of_no_mesh_and_of_an_auto_mesh_go_along(typed):
    add = iso.jax_function(torch.add)
    x, flat = on(typed, np.ones((8, 4), np.float32), "x"), on(grid(AUTO, AUTO), np.ones(4))
    for run in (add, jax.jit(add)):
        assert type_of(run(x, np.ones(4, np.float32))) == "f32[8@x,4]"
        assert type_of(run(x, jnp.ones(4, jnp.float32))) == "f32[8@x,4]"
    assert type_of(add(x, flat.astype(np.float32))) == "f32[8@x,4]"


def test_random_keys_on_the_mesh(typed):
    drop, x = iso.jax_function(torch.nn.Dropout(0.5)), on(typed, np.ones((8, 4), np.float32), "x")
    key = jax.device_put(jax.random.key(0), NamedSharding(typed, P()))
    got = jax.jit(lambda x, key: drop({}, x, rng=key))(x, key)
    assert type_of(got) == ("f32[8,4]" if OF_JAX_9 else "f32[8@x,4]")  # as the compiler chooses
    close(got, drop({}, np.ones((8, 4), np.float32), rng=jax.random.key(0)))


@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
def test_mixed_meshes(kinds):
    mesh = grid(*kinds)
    f = iso.jax_function(torch.matmul)
    x, w = on(mesh, data(8, 4).numpy(), "x"), on(mesh, data(4, 8).numpy(), None, "y")
    got, (of_x, of_w) = jax.jit(
        lambda x, w: (f(x, w), jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w))
    )(x, w)
    want = {(EXPLICIT, AUTO): "f32[8@x,8]", (AUTO, EXPLICIT): "f32[8,8@y]"}[kinds]
    assert type_of(got) == want and got.sharding.spec == P("x", "y")  # the compiler's as well
    assert type_of(of_x) == type_of(x) and type_of(of_w) == type_of(w)
    assert got.sharding.mesh == mesh


def test_part_of_the_mesh_in_shard_map(typed):
    x = on(typed, data(8, 4).numpy(), "x", "y")

    def mapped(f: Any) -> Any:
        run = jax.shard_map(
            f, mesh=typed, in_specs=P("x"), out_specs=P("x"), axis_names=frozenset({"x"})
        )
        return jax.jit(run)(x)

    with pytest.raises(ShardingError, match=r"double is called in jax\.shard_map over \['x'\]"):
        mapped(iso.jax_function(double))
    got = mapped(iso.jax_function(double, out_sharding=P(None, "y")))
    assert type_of(got) == "f32[8@x,4@y]"
    close(got, 2 * data(8, 4))


def test_no_collective_but_those_of_auto_axes(typed):
    f = iso.jax_function(Net())
    texts = []
    for mesh in (typed, grid(AUTO, AUTO)):
        params = {name: on(mesh, array, *SPECS[name]) for name, array in f.params.items()}
        x = on(mesh, data(8, 4).numpy(), "x")
        step = jax.jit(jax.value_and_grad(lambda p, x: loss(f, p, x)))
        with jax.set_mesh(mesh):
            texts.append(step.lower(params, x).compile().as_text())
    counts = [
        [text.count(name) for name in ("all-reduce(", "all-gather(", "collective-permute(")]
        for text in texts
    ]
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_meshes_that_do_not_go_together_are_named_by_argument(typed):
    other = jax.make_mesh((8,), ("z",))
    add = iso.jax_function(lambda params, x: params["w"] + x)
    w, x = on(typed, np.ones(8, np.float32), "x"), on(other, np.ones(8, np.float32), "z")
    with pytest.raises(ShardingError, match=r"different meshes: argument.0.w on 'x' \(2, Ex.*'z'"):
        add({"w": w}, x)
    mixed = on(grid(EXPLICIT, AUTO), np.ones(8, np.float32), "x")
    with pytest.raises(ShardingError, match=r"'y' \(4, Explicit\).*'y' \(4, Auto\)"):
        add({"w": w}, mixed)


def test_buffers_are_shared_between_the_types(typed, counted):
    x = on(typed, data(8, 4).numpy(), "x")
    same = iso.jax_function(lambda x: x)(x)
    assert type_of(same) == "f32[8@x,4]"
    for one, two in zip(same.addressable_shards, x.addressable_shards, strict=True):
        assert one.data.unsafe_buffer_pointer() == two.data.unsafe_buffer_pointer()
    assert counted("copied_bytes") == 0 and counted("gathers") == 0


@AMBIENT
def test_a_gradient_of_its_own(typed):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (x,) = ctx.saved_tensors
            return gradient * x + torch.ones(4)

    f, x = iso.jax_function(Own.apply), on(typed, data(8, 4).numpy(), "x")
    steps = [jax.jit(jax.grad(lambda x: f(x).sum()))]
    if not jax.sharding.get_abstract_mesh().empty:
        steps.append(jax.grad(lambda x: f(x).sum()))
    for step in steps:
        assert type_of(step(x)) == "f32[8@x,4]"
        close(step(x), data(8, 4) + 1)


def test_values_from_around_the_function(typed):
    w = on(typed, data(4, 8, seed=1).numpy(), None, "y")

    @jax.jit
    def outer(x: Any, w: Any) -> Any:
        return iso.jax_function(lambda x: x @ iso.to_torch(w))(x)

    got = outer(on(typed, data(8, 4).numpy(), "x"), w)
    assert type_of(got) == "f32[8@x,8@y]"
    close(got, data(8, 4) @ data(4, 8, seed=1))


def test_without_devices():
    mesh = jax.sharding.AbstractMesh((64, 64), ("x", "y"), axis_types=(EXPLICIT, EXPLICIT))
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((128, 64), P("x")), ((64, 128), P(None, "y")))
    ]
    f = iso.jax_function(torch.matmul)
    assert type_of(jax.eval_shape(f, *shapes)) == "f32[128@x,128@y]"
    exported = jax.export.export(jax.jit(f), platforms=("tpu",))(*shapes)
    (aval,) = exported.out_avals
    assert aval.str_short(short_dtypes=True) == "f32[128@x,128@y]"


def test_what_is_said_holds_on_auto_axes_too():
    mesh = grid(AUTO, AUTO)
    x = on(mesh, data(8, 4).numpy(), "x")
    assert iso.jax_function(double, out_sharding=P(None, "y"))(x).sharding.spec == P(None, "y")

    def marked(x: torch.Tensor) -> torch.Tensor:
        return xs.mark_sharding(x + 1, mesh, P("y", "x"))

    f = iso.jax_function(marked)
    assert [run(x).sharding.spec for run in (f, jax.jit(f))] == [P("y", "x")] * 2
    assert jax.jit(f).lower(x).as_text().count("sharding_constraint") == 1
    crossed = iso.jax_function(double, out_sharding=NamedSharding(grid(EXPLICIT, AUTO), P("x")))
    assert type_of(crossed(x)) == "f32[8@x,4]"


@named_axis_of_vmap
def test_a_sum_over_a_named_axis_cannot_be_laid_out_alone(typed):
    inner = iso.torch_function(lambda x: x - jax.lax.pmean(x, "batch"))
    x = on(typed, data(3, 8, 4).numpy(), None, "x")

    def mapped(f: Any) -> Any:
        return jax.jit(jax.vmap(f, axis_name="batch"))(x)

    with pytest.raises(ShardingError, match=r"inner is called with the effects .*batch"):
        mapped(iso.jax_function(inner_of(inner)))
    got = mapped(iso.jax_function(inner_of(inner), out_sharding=P("x")))
    assert type_of(got) == "f32[3,8@x,4]"
    close(got, data(3, 8, 4) - data(3, 8, 4).mean(0))


def inner_of(function: Any) -> Any:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    return inner
