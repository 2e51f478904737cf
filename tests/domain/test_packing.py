"""Packing global arrays into blocks, out of them and into others; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import isoshard as iso
from isoshard import P, ShardingError, UnevenArray
from isoshard.core.layout.spec import same_layout
from isoshard.errors import CopyError, SpecError, UnevenError
from tests.domain.blocks import out_of_blocks
from tests.domain.traffic import compiled, gathered

X = np.arange(54, dtype=np.float32).reshape(18, 3)


@pytest.fixture
def line():
    return iso.make_mesh((4,), ("x",))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("numpy", (5, 2, 7, 4)),
        ("jax", (18, 0, 0, 0)),
        ("elsewhere", None),
        ("sharded", (0, 3, 9, 6)),
        ("traced", (0, 3, 9, 6)),
        ("traced", None),
    ],
)
def test_any_sizes(line, sizes, kind):
    if kind == "traced":
        u = jax.jit(lambda x: iso.shard(x, line, P("x"), uneven="pad", sizes=sizes))(X)
    else:
        x = X if kind == "numpy" else jnp.asarray(X)
        x = iso.shard(x, line, P()) if kind == "sharded" else x
        x = jax.device_put(x, jax.devices()[5]) if kind == "elsewhere" else x
        u = iso.shard(x, line, P("x"), uneven="pad", sizes=sizes)
    assert u.sizes == (sizes or (5, 5, 5, 3), None)
    assert u.shape == (18, 3) and u.layout == NamedSharding(line, P("x"))
    assert same_layout(u.sharding, u.layout, 2)
    np.testing.assert_array_equal(out_of_blocks(u), X)
    assert not np.asarray(u.array)[~np.asarray(u.mask())].any()
    np.testing.assert_array_equal(iso.domain.unpack(u), X)
    np.testing.assert_array_equal(jax.jit(iso.domain.unpack)(u), X)


def test_what_divides_is_a_plain_array(line):
    for sizes in (None, (4, 4, 4, 4)):
        x = iso.shard(X[:16], line, P("x"), uneven="pad", sizes=sizes)
        assert isinstance(x, jax.Array) and x.sharding.spec == P("x")
    tree = iso.shard({"a": X, "b": X[:8]}, line, P("x"), uneven="pad")
    assert isinstance(tree["a"], UnevenArray) and isinstance(tree["b"], jax.Array)


def test_gradients_of_packing_read_no_padding(line):
    def loss(x):
        u = iso.domain.pack(x, line, P("x"), (5, 2, 7, 4))
        v = iso.domain.repack(u, (0, 3, 9, 6))
        return (iso.domain.unpack(v) ** 2).sum() + 0 * jnp.log(v.array).sum(where=v.mask())

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X + 1), 2 * (X + 1))


def test_repack_and_reshard(line, mesh):
    u = iso.shard(X, line, P("x"), uneven="pad", sizes=(5, 2, 7, 4))
    v = iso.domain.repack(u, (0, 3, 9, 6))
    assert v.sizes == ((0, 3, 9, 6), None) and v.sharding == u.sharding
    np.testing.assert_array_equal(out_of_blocks(v), X)
    assert iso.domain.repack(u).sizes == ((5, 5, 5, 3), None)
    text = compiled(lambda u: iso.domain.repack(u, {0: (0, 3, 9, 6)}), u)
    assert gathered(text) == 0 and "collective-permute" in text
    assert iso.reshard(u, P("x")).array is u.array
    over = iso.reshard(u, mesh, P("y"))  # four blocks again, on other devices
    assert over.sizes == u.sizes and over.sharding.spec == P("y")
    np.testing.assert_array_equal(out_of_blocks(over), X)
    assert iso.reshard(over, P(("x", "y"))).sizes == ((3,) * 6 + (0, 0), None)
    even = iso.reshard(over, P("x"))
    assert isinstance(even, jax.Array) and even.sharding.spec == P("x")
    np.testing.assert_array_equal(even, X)
    assert iso.shard(u, line, P()).shape == (18, 3)
    traced = jax.jit(lambda u: iso.reshard(u, line, P("x")))(u)
    assert traced.sizes == u.sizes


def test_two_mesh_axes_on_one(mesh):
    v = iso.shard(X, mesh, P(("x", "y")), uneven="pad", sizes={-2: (1, 4, 0, 4, 2, 2, 5, 0)})
    np.testing.assert_array_equal(out_of_blocks(v), X)
    assert v.sizes == ((1, 4, 0, 4, 2, 2, 5, 0), None)


def test_full(line, counted):
    u = iso.shard(X, line, P("x"), uneven="pad", sizes=(0, 3, 9, 6))
    whole = iso.full({"u": u, "x": iso.shard(X[:8], line, P("x"))})
    assert whole["u"].is_fully_replicated and counted("gathers") == 2
    np.testing.assert_array_equal(whole["u"], X)
    assert iso.sharding_of([u]) == [u.sharding]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_local_shards_are_exact(mesh, framework):
    sizes = ((5, 0, 7, 6), (1, 2))
    u = iso.shard(X, mesh, P("y", "x"), uneven="pad", sizes=sizes)
    shards = iso.local_shards(u, framework)
    for shard, (column, row) in zip(shards, np.ndindex(2, 4), strict=True):
        assert tuple(shard.data.shape) == (sizes[0][row], sizes[1][column])
        np.testing.assert_array_equal(np.asarray(shard.data), X[shard.index])
    assert shards[1].index == (slice(5, 5), slice(0, 1))
    if framework == "torch":  # views
        own = u.array.addressable_shards[0].data
        assert shards[0].data.data_ptr() == own.unsafe_buffer_pointer()


def test_local_shards_of_several_blocks_side_by_side():
    pair = iso.make_mesh((2,), ("x",))
    rows = np.array([0, 1, 2, -1, -1, -1, 3, 4], np.float32)
    u = UnevenArray(iso.shard(rows, pair, P("x")), (5,), ((2, 1, 0, 2),))
    shards = iso.local_shards(u, "torch")
    assert [shard.index for shard in shards] == [(slice(0, 3),), (slice(3, 5),)]
    assert [np.asarray(shard.data).tolist() for shard in shards] == [[0, 1, 2], [3, 4]]


def test_scatter_tensor(line, mesh):
    shapes = [(5, 3), (2, 3), (7, 3), (4, 3)]
    for key, over in ((0, line), ("x", line), (1, mesh), ("y", mesh)):
        spec = P("x") if over is line else P("y")
        u = iso.domain.scatter_tensor(X, over, spec, {key: shapes})
        assert u.sizes == ((5, 2, 7, 4), None)
        np.testing.assert_array_equal(out_of_blocks(u), X)
    assert iso.domain.scatter_tensor(X[:5], line, P("x")).sizes == ((2, 2, 1, 0), None)


@pytest.mark.parametrize(
    ("spec", "shapes", "fault"),
    [
        (P("x"), "infer", "'chunk' or a mapping"),
        (P("x"), {"z": []}, "no mesh axis 'z'"),
        (P("x"), {1: [(18, 3)]}, "mesh axis 1 splits no axis"),
        (P(("x", "y")), {"x": [(9, 3), (9, 3)]}, "splits axis 0 with others"),
        (P("x"), {"x": [(9,), (9,)]}, r"another rank: \[\(9,\), \(9,\)\]"),
        (P("x"), {"x": [(9, 3), (9, 2)]}, r"a shape is \(9, 2\), and axis 1 has 3"),
        (P("x"), {"x": [(9, 3), (8, 3)]}, "axis 0 is given 17 elements, and has 18"),
    ],
)
def test_shapes_that_do_not_fit(mesh, spec, shapes, fault):
    with pytest.raises(ShardingError, match=fault):
        iso.domain.scatter_tensor(X, mesh, spec, shapes)


@pytest.mark.parametrize(
    ("spec", "sizes", "fault"),
    [
        (P("y"), (5, 2, 7, 5), "axis 0 is given 19 elements, and has 18"),
        (P("y"), (9, 9), "axis 0 is given 2 sizes for its 4 blocks"),
        (P("y"), (-1, 9, 9, 1), "sizes below 0"),
        (P("y"), ((5, 2, 7, 4),), "1 entries for 2 axes"),
        (P("y", "x"), (5, 2, 7, 4), "2 axes are split, so sizes"),
        (P("y"), (None, (1, 2)), "axis 1 is given sizes, and no mesh axis splits it"),
        (P("y"), {3: (1, 2)}, "there is no axis 3"),
    ],
)
def test_sizes_that_do_not_fit(mesh, spec, sizes, fault):
    with pytest.raises(UnevenError, match=fault):
        iso.shard(X, mesh, spec, uneven="pad", sizes=sizes, name="field")


def test_what_is_refused(line):
    with pytest.raises(UnevenError, match="no multiple of its 4 shards"):
        iso.shard(X, line, P("x"))
    with pytest.raises(ShardingError, match="'error' or 'pad', not 'crop'"):
        iso.shard(X, line, P("x"), uneven="crop")
    with pytest.raises(ShardingError, match="which needs uneven='pad'"):
        iso.shard(X, line, P("x"), sizes=(5, 2, 7, 4))
    with pytest.raises(CopyError, match="padded, which takes new memory"):
        iso.shard(X, line, P("x"), uneven="pad", copy=False)
    with pytest.raises(ShardingError, match="x is a tree of arrays"):
        iso.shard([X], line, P("x"), uneven="pad", sizes=(5, 2, 7, 4))
    with pytest.raises(SpecError, match="no mesh axis is called 'z'"):
        iso.shard([X, X], line, P("z"), uneven="pad")
    with pytest.raises(ShardingError, match="has no known mesh"):
        iso.domain.repack(UnevenArray(jnp.zeros(4), (3,), ((1, 2),)), (2, 1))
