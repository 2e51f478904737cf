"""Pictures of layouts: goldens for every rank, abbreviations, colours, wrong input."""

import copy
import io
import pickle
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import isoshard as iso
import isoshard.torch_bridge
from isoshard import Plan
from isoshard.core.errors import ShardingError, SpecError, UnevenError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.pictures import box_drawing, layout_picture
from isoshard.core.pictures.visualize import visualize


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("x", "y"), axis_types=AxisType.Auto)  # a picture names other types


def _is(text, golden):
    assert text.splitlines() == [line.rstrip() for line in golden.strip("\n").splitlines()]


def test_rank_4_draws_the_sharded_axes(mesh):
    _is(
        visualize((None, "x", None, 1), shape=(3, 2, 5, 8), mesh=mesh),
        """
[3, 2, 5, 8]  P(None, 'x', None, 'y')  mesh (x=2, y=4)
8 blocks of [3, 1, 5, 2], each on 1 device
[:, ↓, :, →]
       0:2     2:4     4:6     6:8
    ┌───────┬───────┬───────┬───────┐
0:1 │   0   │   1   │   2   │   3   │
    ├───────┼───────┼───────┼───────┤
1:2 │   4   │   5   │   6   │   7   │
    └───────┴───────┴───────┴───────┘
""",
    )


def test_a_third_sharded_axis_becomes_slices():
    _is(
        visualize("{devices=[2,1,2,2]<=[8]}", shape=(4, 3, 2, 8)),
        """
[4, 3, 2, 8]  {devices=[2,1,2,2]<=[8]}  8 devices
8 blocks of [2, 3, 1, 4], each on 1 device
[↓, :, →, 0:4]
       0:1     1:2
    ┌───────┬───────┐
0:2 │   0   │   2   │
    ├───────┼───────┤
2:4 │   4   │   6   │
    └───────┴───────┘
[↓, :, →, 4:8]
       0:1     1:2
    ┌───────┬───────┐
0:2 │   1   │   3   │
    ├───────┼───────┤
2:4 │   5   │   7   │
    └───────┴───────┘
""",
    )


def test_an_array_on_one_device():
    _is(
        visualize(jnp.ones((2, 3))),
        f"""
float32[2, 3]  on {jax.devices()[0]}
1 block of [2, 3], on 1 device
       0:3
    ┌───────┐
0:2 │   0   │
    └───────┘
""",
    )


def test_a_tree_has_one_picture_per_leaf(mesh):
    whole = NamedSharding(mesh, P())
    tree = {"b": [jax.device_put(jnp.ones(8), whole)], "a": jnp.float32(1)}
    text = visualize(tree)
    assert [line for line in text.splitlines() if re.fullmatch(r"\w(\.\w)?", line)] == ["a", "b.0"]
    assert visualize(tree["b"][0]) in text


def test_large_grids_are_abbreviated():
    lines = visualize("{devices=[32,32]<=[1024]}", shape=(1024, 1024), width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[2].split() == ["0:32", "32:64", "…", "992:1024"]
    assert lines[4].split() == ["0:32", *"│0│1│…│", "31", "│"]
    assert lines[-4].split()[0] == "…"
    assert lines[-2].split()[-2] == "1023"
    assert sum("│" in line for line in lines) == box_drawing.MAX_ROWS


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("{devices=[1,2]0,1 last_tile_dim_replicate}", "0,1"),
        ("{devices=[1,3]0,1,2 last_tile_dim_replicate}", "0-2"),
        ("{devices=[1,5]0,1,2,4,6 last_tile_dim_replicate}", None),
        ("{devices=[1,8]<=[8] last_tile_dim_replicate}", "0-7"),
        ("{devices=[2,16]<=[16,2]T(1,0) last_tile_dim_replicate}", "0,2,…,30"),
    ],
)
def test_device_numbers_are_shortened(text, inside):
    if inside is None:
        with pytest.raises(ShardingError, match="device"):
            visualize(text)
    else:
        assert f" {inside} " in visualize(text)


def test_colours_change_no_character(mesh):
    sharding = NamedSharding(mesh, P("x", "y"))
    text = visualize(sharding, shape=(8, 8), use_rich=True)
    assert "\x1b[" in text
    bare = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())
    assert bare == visualize(sharding, shape=(8, 8), use_rich=False)
    text = visualize(P("y"), shape=(8,), mesh=mesh, use_rich=True)  # each block has its colour
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", text))) == 4
    assert " 0-7 " in visualize("{replicated}", shape=(2, 2), mesh=mesh)


def test_colour_is_for_terminals(mesh, monkeypatch, capsys):
    """The text itself never has escape codes: it may go into a file or a message."""
    picture = visualize(P(), shape=(8,), mesh=mesh)
    assert "\x1b[" not in picture
    assert repr(picture) == str(picture) == f"{picture}"
    picture.show()
    assert capsys.readouterr().out == f"{picture}\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(layout_picture.sys.stdout, "isatty", lambda: True)
    picture.show()
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    picture.show()
    assert "\x1b[" not in capsys.readouterr().out


def test_rich_prints_it_in_colours(mesh):
    out = io.StringIO()
    picture = visualize(P("y"), shape=(8,), mesh=mesh)
    Console(file=out, force_terminal=True, color_system="truecolor", width=120).print(picture)
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", out.getvalue()))) == 4
    again = pickle.loads(pickle.dumps(picture))  # as a text
    assert again == picture and repr(again) == str(picture)
    assert copy.deepcopy(picture) == picture
    assert visualize("{devices=[2,2,16]<=[64]}").splitlines()[-1] == "… 8 more slices"


def test_a_module_is_drawn_with_shapes(mesh):
    """Rows are rows, also where the spec is shorter than the rank."""
    for module, name in (
        (torch.nn.Linear(8, 4), "weight"),
        (nnx.Linear(4, 8, rngs=nnx.Rngs(0)), "kernel"),
    ):
        laid = iso.shard(module, mesh, Plan({f"*{name}": P("x"), "*": None}, replicate_below=0))
        picture = visualize(laid)
        drawn = {one.name: one for one in picture.drawings}
        array = laid.weight if name == "weight" else laid.kernel[...]
        assert "\n".join(picture.splitlines()).count(visualize(array)) == 1
        assert drawn[name].title[0] == f"float32{list(array.shape)}"
        assert len(drawn[name].panels[0].cells) == 2


def test_what_devices_hold(mesh):
    """A tree says what devices hold of it, and where some hold more, which."""
    rows = NamedSharding(mesh, P("x"))
    tree = {"a": jax.device_put(jnp.ones((8, 4)), rows), "b": jnp.ones(4)}
    assert visualize(tree).splitlines()[-3] == "each device stores at most 80 B of 144 B (56%)"
    assert [line.split()[0] for line in visualize(tree).splitlines()[-2:]] == ["0", "1-7"]
    tree["b"] = jax.device_put(tree["b"], NamedSharding(mesh, P()))
    assert visualize(tree).splitlines()[-2] == "each device stores 80 B of 144 B (56%)"
    tree["b"] = iso.shard(np.ones(5, np.float32), mesh, P("y"), uneven="pad")  # with its padding
    assert visualize(tree).splitlines()[-2] == "each device stores 72 B of 148 B (49%)"
    assert visualize(tree["b"]) in visualize(tree)
    assert "stores" not in visualize({"a": rows, "b": rows})  # of what shape is not known


def test_a_notebook_shows_boxes(mesh):
    tree = {"<w>": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("x", "y")))}
    found = ElementTree.fromstring(visualize(tree)._repr_html_())
    assert [one.text for one in found.iter("h4")] == ["<w>"]
    cells = list(found.iter("td"))
    assert [one.text for one in cells] == [str(n) for n in range(8)]
    assert cells[5].get("title") == "[4:8, 1:2] on 5"
    assert len({one.get("style") for one in cells}) == 8
    words = "".join(found.itertext())
    assert "each device stores 16 B of 128 B (12%)" in words
    assert "gathered over x: each device receives 16 B" in words
    assert "gathered over y: each device receives 48 B" in words


def test_wrong_input(mesh):
    with pytest.raises(SpecError, match=r"spec P\('x',\) alone names no devices; give its mesh"):
        visualize(P("x"))
    with pytest.raises(SpecError, match=r"'\{replicated\}' names neither rank nor devices"):
        visualize("{replicated}", shape=(2, 2))
    with pytest.raises(SpecError, match="no mesh axis is called 'z'"):
        visualize(P("z"), mesh=mesh)
    with pytest.raises(UnevenError, match="7"):
        visualize(P("x"), shape=(7,), mesh=mesh)
    with pytest.raises(ShardingError, match=r"shape \(7,\) does not split"):
        visualize(NamedSharding(mesh, P("x")), shape=(7,))
    with pytest.raises(ShardingError, match="it is for a tensor of rank 2, not 1"):
        visualize("{devices=[2,1]0,1}", shape=(2,))
    with pytest.raises(TypeError, match="cannot draw a object; give an array"):
        visualize(object())


class TestMeshes:
    def test_axis_types_that_are_not_auto(self):
        kinds = (AxisType.Explicit, AxisType.Auto)
        mixed = make_mesh((2, 4), ("x", "y"), axis_types=kinds)
        assert visualize(P("x"), shape=(8,), mesh=mixed).startswith(
            "[8]  P('x',)  mesh (x=2 Explicit, y=4)\n"
        )
        array = jax.device_put(jnp.ones(8), NamedSharding(jax.make_mesh((8,), ("x",)), P("x")))
        assert "mesh (x=8 Explicit)" in visualize(array)

    def test_without_devices(self, mesh):
        # said, since abstract meshes are Explicit by default from JAX 0.11 on
        abstract = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        golden = visualize(P("y"), shape=(8,), mesh=mesh)
        assert visualize(P("y"), shape=(8,), mesh=abstract) == golden
        assert visualize(NamedSharding(abstract, P("y")), shape=(8,)) == golden

    def test_what_is_only_promised(self, mesh):
        sharding = NamedSharding(mesh, P("y"))
        array = jax.device_put(jnp.ones(8), sharding)
        promised = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
        assert visualize(promised) == visualize(array)
        assert visualize({"w": promised}) == visualize({"w": array})
        with pytest.raises(SpecError, match=r"has no sharding; give it one"):
            visualize(jax.ShapeDtypeStruct((8,), jnp.float32))

    def test_traced(self):
        explicit = jax.make_mesh((2, 4), ("x", "y"))
        array = jax.device_put(jnp.ones(8), NamedSharding(explicit, P("y")))
        seen = []
        jax.jit(lambda x: seen.append(visualize(x)))(array)
        assert seen == [visualize(array)]
        with pytest.raises(ShardingError, match="on Auto axes"):
            jax.jit(visualize)(jnp.ones(8))
