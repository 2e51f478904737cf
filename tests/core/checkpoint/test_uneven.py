"""Arrays in blocks of unequal sizes: saved as what they are, restored into any layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from flax import nnx
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.checkpoint import opened
from isoshard.core.errors import CheckpointError, ShardingError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.weights.weight_errors import WeightError
from tests.core.checkpoint.test_bytes import bytes_read

LINE = iso.make_mesh((4,), ("x",), devices=jax.devices()[:4])
GRID = iso.make_mesh((2, 4), ("x", "y"))
RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((18, 33)).astype(np.float32)
LAYOUTS = {
    "whole": None,
    "even": (iso.make_mesh((3, 2), ("x", "y"), devices=jax.devices()[:6]), P("x"), None),
    "any": (LINE, P("x"), {0: (5, 2, 7, 4)}),
    "empty": (LINE, P("x"), {0: (0, 3, 9, 6)}),
    "columns": (LINE, P(None, "x"), {1: (1, 20, 0, 12)}),
    "both": (GRID, P("y", "x"), {0: (7, 0, 1, 10), 1: (30, 3)}),
    "two names": (GRID, P(("x", "y")), {0: (1, 2, 3, 0, 4, 5, 3, 0)}),
}


def laid(values, layout):
    if layout is None:
        return jnp.asarray(values)
    mesh, spec, sizes = layout
    u = iso.shard(values, mesh, spec, uneven="pad", sizes=sizes)
    if not isinstance(u, UnevenArray) or values.dtype.kind != "f":
        return u
    with_nan = jnp.where(u.mask(), u.array, jnp.nan)  # whoever reads padding is found out
    return UnevenArray(jax.device_put(with_nan, u.array.sharding), u.shape, u.sizes)


def blank(u):
    return jax.tree.map(lambda a: jnp.full_like(a, 7), u)


def padding(u):
    return np.asarray(u.array)[~np.asarray(u.mask())]


def whole(u):
    return np.asarray(iso.full(u))


def test_from_any_split_to_any_other_bit_for_bit(tmp_path, counted):
    values = ROWS.copy()
    values.view(np.uint32)[3, 5] = 0x7FC12345  # a NaN with a payload
    names = list(LAYOUTS)
    likes = {name: blank(laid(values, LAYOUTS[name])) for name in names}
    current = laid(values, LAYOUTS["any"])
    iso.save(tmp_path, dict.fromkeys(names, current))
    for turn in range(2):  # what was restored by one split is saved by it
        gathers = counted("gathers")
        found = iso.restore(tmp_path, likes)
        iso.save(tmp_path, dict(zip(names[1:] + names[:1], found.values(), strict=True)))
        assert counted("gathers") == gathers
        for name in names:
            like, array = likes[name], found[name]
            assert type(array) is type(like) and array.dtype == np.float32, (turn, name)
            assert whole(array).tobytes() == values.tobytes(), (turn, name)
            if isinstance(array, UnevenArray):
                assert array.sizes == like.sizes and array.sharding == like.sharding
                assert array.array.shape == like.array.shape
                assert not padding(array).any()


def test_a_file_is_that_of_an_array_without_padding(tmp_path):
    iso.save(tmp_path, {"w": laid(ROWS, LAYOUTS["any"]), "few": laid(ROWS[:, 0], LAYOUTS["any"])})
    entry = opened(tmp_path).entries["w"]
    assert entry.shape == (18, 33) and entry.spec == (("x",), ()) and entry.nbytes == ROWS.nbytes
    (folder,) = (tmp_path / "0" / "arrays").iterdir()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    assert (tensorstore.open(spec).result().read().result() == ROWS).all()
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != "zarr.json")
    assert ROWS.nbytes <= size < 1.5 * ROWS.nbytes  # with checksums
    few = iso.restore(tmp_path, {"few": np.zeros(18, np.float32)}, partial=True)["few"]
    assert (few == ROWS[:, 0]).all()


def test_a_device_reads_what_it_needs(tmp_path):
    values = RNG.standard_normal((1800, 512)).astype(np.float32)
    saved = {"even": (500, 200, 700, 400), "odd": (501, 199, 701, 399)}
    blocks = {name: (LINE, P("x"), {0: sizes}) for name, sizes in saved.items()}
    iso.save(tmp_path, {name: laid(values, layout) for name, layout in blocks.items()})
    for name in saved:
        for sizes in [(500, 200, 700, 400), (3, 47, 1750, 0)]:
            like = laid(np.zeros_like(values), (LINE, P("x"), {0: sizes}))
            before = bytes_read()
            found = iso.restore(tmp_path, {name: like}, partial=True)[name]
            read = bytes_read() - before
            assert values.nbytes <= read <= 1.15 * values.nbytes  # at an end a chunk is read twice
            assert whole(found).tobytes() == values.tobytes()


def test_nothing_is_gathered_and_only_split_files_are_copied(tmp_path, counted):
    aligned = laid(ROWS, (LINE, P("x"), {0: (4, 2, 8, 4)}))
    other = laid(ROWS, LAYOUTS["any"])
    copies = counted("copies")
    iso.save(tmp_path, {"w": aligned})
    assert counted("gathers") == 0 and counted("copies") == copies
    copies = counted("copied_bytes")
    iso.save(tmp_path, {"w": other})
    assert counted("gathers") == 0 and counted("copied_bytes") - copies <= ROWS.nbytes
    copies = counted("copied_bytes")
    saving = iso.save(tmp_path, {"w": aligned}, asynchronous=True)
    aligned.array.delete()  # as a step that is given it would
    saving.wait()
    assert counted("copied_bytes") - copies == ROWS.nbytes and counted("gathers") == 0
    like = {"w": np.zeros_like(ROWS)}
    assert (iso.restore(tmp_path, like)["w"] == ROWS).all()


def test_other_meshes_keep_sizes_where_there_are_as_many_blocks(tmp_path):
    iso.save(tmp_path, {"w": laid(ROWS, LAYOUTS["empty"]), "v": np.ones((8, 8), np.float32)})
    like = {"w": laid(np.zeros_like(ROWS), LAYOUTS["empty"]), "v": jnp.zeros((8, 8))}
    shapes = jax.eval_shape(lambda: like["w"])
    four, eight, two = (
        iso.make_mesh((n,), ("x",), devices=jax.devices()[8 - n :]) for n in (4, 8, 2)
    )
    for given, mesh, plan, sizes in [
        (like["w"], four, None, ((0, 3, 9, 6), None)),
        (shapes, four, P("x"), ((0, 3, 9, 6), None)),
        (like["w"], eight, None, ((3, 3, 3, 3, 3, 3, 0, 0), None)),
        (like["w"], eight, P(None, "x"), (None, (5, 5, 5, 5, 5, 5, 3, 0))),
        (like["w"], two, iso.Plan({"w": P("x"), "v": P()}), None),
    ]:
        found = iso.restore(tmp_path, {**like, "w": given}, mesh=mesh, plan=plan)["w"]
        assert whole(found).tobytes() == ROWS.tobytes()
        assert getattr(found, "sizes", None) == sizes
        assert found.sharding.mesh == mesh
    with pytest.raises(ShardingError, match=r"v: spec [\s\S]*\n  w: spec .*\('z',\) does not fit"):
        iso.restore(tmp_path, like, mesh=four, plan=P("z"))
    with pytest.raises(CheckpointError, match=r"w: shape \(18, 33\) in the checkpoint, \(18,\)"):
        iso.restore(tmp_path, {**like, "w": laid(ROWS[:, 0], LAYOUTS["any"])})


def test_through_a_map(tmp_path):
    iso.save(tmp_path, {"turned": laid(ROWS.T.copy(), (LINE, P(None, "x"), {1: (5, 2, 7, 4)}))})
    like = laid(ROWS * 0, LAYOUTS["any"])
    also = laid(np.zeros((33, 18), np.float32), (GRID, P("x"), None))  # of more devices
    found = iso.restore(
        tmp_path, {"w": like, "turned": also}, weights=lambda tree: {"w": tree["turned"].T, **tree}
    )
    assert found["w"].sizes == like.sizes and found["w"].sharding == like.sharding
    assert whole(found["w"]).tobytes() == ROWS.tobytes() and not padding(found["w"]).any()
    assert found["turned"].sizes == also.sizes


def test_flax_modules(tmp_path):
    class Module(nnx.Module):
        def __init__(self, rows):
            self.rows, self.bias = nnx.Param(rows), nnx.Param(jnp.ones(3))

    iso.save(tmp_path, {"model": Module(laid(ROWS, LAYOUTS["any"]))})
    assert set(opened(tmp_path).entries) == {"model.rows", "model.bias"}
    like = Module(laid(ROWS * 0, LAYOUTS["empty"]))
    assert iso.restore(tmp_path, {"model": like})["model"] is like
    rows = like.rows.get_value()
    assert whole(rows).tobytes() == ROWS.tobytes()
    assert rows.sizes[0] == (0, 3, 9, 6)


def test_equinox_modules(tmp_path):
    import equinox

    class Module(equinox.Module):
        rows: object
        act: object = jnp.tanh

    iso.save(tmp_path, {"model": Module(laid(ROWS, LAYOUTS["any"]))})
    assert set(opened(tmp_path).entries) == {"model.rows"}
    like = Module(laid(ROWS * 0, LAYOUTS["empty"]))
    found = iso.restore(tmp_path, {"model": like}, mesh=GRID)["model"]
    assert whole(found.rows).tobytes() == ROWS.tobytes() and found.act is jnp.tanh
    assert getattr(found.rows, "sizes", ((9, 9),))[0] == (9, 9)


def test_shapes_are_not_saved_and_one_device_is_no_place(tmp_path):
    u = laid(ROWS, LAYOUTS["any"])
    with pytest.raises(ShardingError, match="w is only the shape of an array"):
        iso.save(tmp_path, {"w": jax.eval_shape(lambda: u)})
    iso.save(tmp_path, {"w": u})
    alone = UnevenArray(jnp.zeros((20, 33)), (18, 33), ((10, 8), None))
    with pytest.raises(TypeError, match=r"w: an UnevenArray of shape .* on no mesh"):
        iso.restore(tmp_path, {"w": alone})
    vmapped = jax.tree.map(lambda a: jnp.stack([a, a]), u)
    with pytest.raises(TypeError, match=r"w: an UnevenArray of shape \(18, 33\) that jax.vmap"):
        iso.save(tmp_path, {"w": vmapped})


def test_safetensors(tmp_path):
    from safetensors.numpy import load_file

    tree = {name: laid(ROWS, LAYOUTS[name]) for name in LAYOUTS}
    iso.save_safetensors(tmp_path / "w.safetensors", {"layer": tree})
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == {f"layer.{name}" for name in LAYOUTS}
    assert all(array.tobytes() == ROWS.tobytes() for array in found.values())
    like = {"layer": jax.tree.map(jnp.zeros_like, tree)}
    back = iso.restore(tmp_path / "w.safetensors", like)["layer"]
    for name, array in back.items():
        assert type(array) is type(tree[name]) and whole(array).tobytes() == ROWS.tobytes()
    with pytest.raises(WeightError, match="not an UnevenArray"):
        iso.save_safetensors(tmp_path / "v", tree["any"])
