"""Verbs on meshes of every axis type: computed under Auto axes, given back on the caller's mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
from isoshard import P
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.spec import same_layout

from .blocks import in_blocks, out_of_blocks
from .traffic import compiled, gathered, sent, summed

KINDS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
    "mixed otherwise": (AxisType.Auto, AxisType.Explicit),
}
SIZES = (None, (5, 2, 7, 4), None)
X = np.random.default_rng(0).normal(size=(4, 16, 8)).astype(np.float32)
U = np.random.default_rng(1).normal(size=(4, 18, 8)).astype(np.float32)
SPEC = P("x", "y")


@pytest.fixture
def typed(request):
    """The mesh (2, 4) of a kind."""
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=KINDS[request.param])


def attend(mesh, x):
    x = x.reshape(*x.shape[:2], 2, 4)
    return iso.domain.ring_attention(x, x, x, mesh=mesh, axis="y", batch="x")


VERBS = {
    "cumsum": lambda mesh, x: iso.domain.cumsum(x, 1, mesh=mesh, spec=SPEC),
    "fft": lambda mesh, x: jnp.abs(iso.domain.fft(x, 2)),
    "lift": lambda mesh, x: iso.domain.lift(lambda x: jax.nn.softmax(x, 1))(x),
    "zigzag": lambda mesh, x: iso.domain.zigzag(x, mesh=mesh, axis="y", dim=1),
    "attention": lambda mesh, x: attend(mesh, x),
}


def layout_of(x):
    return jax.typeof(x).sharding


def check(found, wanted, mesh):
    """Equal numbers; on the mesh, with a type along its Explicit axes."""
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert found.sharding.mesh == mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kept = [name if kinds[name] == AxisType.Explicit else None for name in ("x", "y")]
    assert [*layout_of(found).spec][:2] == kept
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, SPEC), found.ndim)


def both(mesh, names):
    """A function of an array: what some verbs give, and their gradients."""

    def run(x):
        found = {}
        for name in names:
            verb = functools.partial(VERBS[name], mesh)
            if name == "attention":  # whose gradient takes long to compile
                found[name] = verb(x), x
                continue
            out, pull = jax.vjp(verb, x)
            found[name] = out, pull(jnp.sin(out))[0]
        return found

    return run


@pytest.mark.parametrize(
    ("names", "typed"),
    [(list(VERBS), "explicit"), (["cumsum"], "mixed")],
    indirect=["typed"],
)
def test_every_verb_gives_and_sends_what_it_does_under_auto_axes(typed, names):
    own = auto(typed)
    x, same = (iso.shard(X, mesh, SPEC) for mesh in (typed, own))
    programs = [
        jax.jit(both(mesh, names)).lower(a).compile() for mesh, a in ((typed, x), (own, same))
    ]
    found, wanted = programs[0](x), programs[1](same)
    for name in names:
        check(found[name][0], wanted[name][0], typed)
        np.testing.assert_allclose(
            found[name][1], wanted[name][1], rtol=1e-4, atol=1e-5, err_msg=name
        )
        assert layout_of(found[name][1]) == layout_of(x), name
        if name in ("cumsum", "lift"):
            check(VERBS[name](typed, x), wanted[name][0], typed)
    for count in (sent, gathered, summed):
        assert count(programs[0].as_text()) == count(programs[1].as_text())
    some = names[:1]
    with jax.set_mesh(typed):
        ambient = jax.jit(both(typed, some))(x)
    for name, (out, slope) in ambient.items():
        check(out, wanted[name][0], typed)
        np.testing.assert_allclose(slope, wanted[name][1], rtol=1e-4, atol=1e-5, err_msg=name)
        assert layout_of(slope) == layout_of(x), name
    _, pull = jax.vjp(functools.partial(VERBS[some[0]], typed), x)
    slope = pull(jnp.sin(ambient[some[0]][0]))[0]
    np.testing.assert_allclose(slope, wanted[some[0]][1], rtol=1e-4, atol=1e-5)
    assert layout_of(slope) == layout_of(x)


@pytest.mark.parametrize(
    ("verb", "typed"),
    [("cumsum", "mixed"), ("fft", "mixed otherwise"), ("lift", "explicit")],
    indirect=["typed"],
)
def test_arrays_in_blocks(typed, verb):
    u = in_blocks(U, typed, SPEC, SIZES)
    run = {**VERBS, "fft": lambda mesh, u: iso.domain.fft(u, 2)}[verb]
    powers = np.exp(U)
    wanted = {
        "cumsum": U.cumsum(1),
        "fft": np.fft.fft(U, axis=2),
        "lift": powers / powers.sum(1, keepdims=True),
    }[verb]
    with jax.set_mesh(typed):
        ambient = jax.jit(functools.partial(run, typed))(u)
    for found in (run(typed, u), ambient):
        np.testing.assert_allclose(out_of_blocks(found), wanted, rtol=1e-4, atol=1e-4)
        assert found.sizes == SIZES
        assert found.layout.mesh == typed and same_layout(found.layout, u.layout, 3)
        assert layout_of(found.array) == layout_of(u.array)
        assert found.array.sharding.mesh == typed


class TestExplicit:
    """What only a type can tell."""

    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((2, 4), ("x", "y"))

    def test_a_traced_array_tells_its_layout(self, mesh):
        x = iso.shard(X, mesh, SPEC)
        found = jax.jit(lambda x: iso.domain.cumsum(x, 1) + x)(x)
        assert str(jax.typeof(found)) == "float32[4@x,16@y,8]"
        np.testing.assert_allclose(found, X.cumsum(1) + X, rtol=1e-5, atol=1e-5)

    def test_channels_lie_as_the_kernel_that_makes_them(self, mesh):
        x = iso.shard(X, mesh, P(None, None, "y"))
        kernel = iso.shard(np.ones((6, 16, 3), np.float32) / 8, mesh, P("x"))
        run = jax.jit(lambda x, kernel: iso.domain.conv(x, kernel, padding=1))
        found = run(x, kernel)
        assert str(jax.typeof(found)) == "float32[4,6@x,8@y]"
        assert gathered(compiled(run, x, kernel)) == 0
        rows = np.pad(X.sum(1), [(0, 0), (1, 1)])
        wanted = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 8
        for channel in np.asarray(found).swapaxes(0, 1):
            np.testing.assert_allclose(channel, wanted, rtol=1e-4, atol=1e-5)

    def test_in_vmap_and_scan(self, mesh):
        x = iso.shard(X, mesh, SPEC)
        found = jax.jit(jax.vmap(lambda x: iso.domain.cumsum(x, 0)))(x)
        assert str(jax.typeof(found)) == "float32[4@x,16@y,8]"
        np.testing.assert_allclose(found, X.cumsum(1), rtol=1e-5, atol=1e-5)
        turned, _ = jax.lax.scan(lambda x, _: (iso.domain.roll(x, 1, 1), None), x, length=3)
        assert jax.typeof(turned) == jax.typeof(x)
        np.testing.assert_array_equal(turned, np.roll(X, 3, 1))

    def test_a_call_in_a_call_stays_under_auto_axes(self, mesh):
        """Also inside a lifted function, which closes over the mesh and over weights on it."""
        u = in_blocks(U, mesh, SPEC, SIZES)
        weights = iso.shard(np.ones((8, 3), np.float32), mesh, P())

        def inner(x):
            assert not jax.typeof(x).sharding.mesh.axis_names
            x = iso.domain.cumsum(jax.nn.relu(x), 1)
            return jax.sharding.reshard(x @ weights, NamedSharding(mesh, P("x")))

        found = iso.domain.lift(inner)(u)
        assert str(jax.typeof(found)) == "float32[4@x,18,3]"
        np.testing.assert_allclose(
            found, np.maximum(U, 0).cumsum(1) @ np.ones((8, 3)), rtol=1e-4, atol=1e-4
        )

    def test_a_mask_has_the_type_of_its_array(self, mesh):
        u = in_blocks(U, mesh, SPEC, SIZES)
        assert layout_of(u.mask()) == layout_of(u.array)
        inside, _ = jax.jit(lambda u: (u.mask(), u))(u)
        assert layout_of(inside) == layout_of(u.array)
        np.testing.assert_array_equal(inside, u.mask())
        u = iso.shard(U, mesh, SPEC, uneven="pad", sizes=SIZES)
        assert iso.reshard(u, SPEC).array is u.array
        whole = iso.full(u)
        assert str(jax.typeof(whole)) == "float32[4,18,8]" and whole.sharding.mesh == mesh
        np.testing.assert_array_equal(whole, U)


@pytest.mark.parametrize("typed", ["explicit", "mixed"], indirect=True)
def test_handlers(typed):
    def handler(shards, x):
        return x * 2, shards.like(x, *range(3))

    routed = iso.domain.register_function_handler(lambda x: x * 2, handler)
    x = iso.shard(X, typed, SPEC)
    found = [routed(x), jax.jit(routed.over(typed, SPEC))(x)]
    if typed.are_all_axes_explicit:
        found.append(jax.jit(routed)(x))
    for one in found:
        np.testing.assert_array_equal(one, X * 2)
        assert one.sharding.is_equivalent_to(x.sharding, 3)
        assert layout_of(one) == layout_of(x)
    u = in_blocks(U, typed, SPEC, SIZES)
    made = routed(u)
    assert made.layout == u.layout and layout_of(made.array) == layout_of(u.array)
    np.testing.assert_array_equal(out_of_blocks(made), U * 2)
