import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, SpecError, UnevenError, UnrepresentableError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.spec import (
    check_even,
    is_spec,
    named_sharding,
    normalize_spec,
    register_spelling,
    same_layout,
)
from isoshard.core.layout.tiles import Tiles

ROWS_BY_X = [
    P("x"),
    P("x", None),
    P(("x",), None),
    ("x",),
    ["x", None],
    (("x",), ()),
    (0,),
    (0, None),
    (np.int64(0), None),
    [[0], []],
    "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
    "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
]


class TestSpellings:
    def test_all_become_one(self, mesh):
        for spec in ROWS_BY_X:
            assert repr(normalize_spec(spec, mesh, 2)) == repr(P("x")), spec
            assert named_sharding(spec, mesh, 2) is named_sharding(P("x"), mesh, 2)
            assert is_spec(spec)
        for spec in (None, P(), (), (None, None), P(None, ()), "{replicated}"):
            assert repr(normalize_spec(spec, mesh, 2)) == repr(P()), spec
        for spec in (P(("y", "x")), ((1, 0),), (("y", 0), None), [[1, "x"]]):
            assert normalize_spec(spec, mesh, 2) == P(("y", "x")), spec
        assert normalize_spec(("x", None), make_mesh((1, 8), ("x", "y")), 2) == P("x")
        assert normalize_spec((), mesh, 0, shape=()) == P()
        assert normalize_spec(("y",), mesh, 1, shape=(0,)) == P("y")

    def test_a_sharding_on_this_mesh(self, mesh):
        assert normalize_spec(NamedSharding(mesh, P(None, "y")), mesh, 2) == P(None, "y")
        flat = make_mesh((8,), ("all",))  # of the same devices
        assert normalize_spec(NamedSharding(flat, P("all")), mesh, 1) == P(("x", "y"))
        explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
        assert normalize_spec(NamedSharding(explicit, P("y")), mesh, 2) == P("y")

    def test_a_sharding_whose_layout_this_mesh_cannot_say(self):
        halves = NamedSharding(make_mesh((2, 4), ("a", "b")), P("a"))
        with pytest.raises(UnrepresentableError, match="w: blocks"):
            normalize_spec(halves, make_mesh((8,), ("x",)), 1, name="w")

    def test_a_sharding_on_devices_in_another_order(self, mesh):
        turned = make_mesh((2, 4), ("x", "y"), devices=jax.devices()[::-1])
        with pytest.raises(SpecError, match=r"w: .*another order.*\.spec"):
            normalize_spec(NamedSharding(turned, P("x")), mesh, 2, name="w")

    def test_a_new_spelling(self, mesh):
        class Columns:
            pass

        def to_tiles(spec, mesh, ndim):
            if ndim < 2:
                raise ShardingError("no columns")
            return Tiles.from_spec(P(None, mesh.axis_names[-1]), mesh, ndim)

        with pytest.raises(SpecError, match="a Columns is no spec"):
            normalize_spec(Columns(), mesh, 2)
        forget = register_spelling(lambda spec: isinstance(spec, Columns), to_tiles)
        try:
            assert normalize_spec(Columns(), mesh, 2) == P(None, "y")
            assert is_spec(Columns())
            with pytest.raises(ShardingError, match="bias: no columns"):
                normalize_spec(Columns(), mesh, 1, name="bias")
        finally:
            forget()
        with pytest.raises(SpecError, match="a Columns is no spec"):
            normalize_spec(Columns(), mesh, 2)


class TestFaults:
    @pytest.mark.parametrize(
        ("spec", "what"),
        [
            (P("z"), "no mesh axis is called 'z'"),
            ((2,), "there is no mesh axis 2"),
            ((-1,), "there is no mesh axis -1"),
            (("x", "x"), "'x' is used 2 times"),
            ((0, "x"), "'x' is used 2 times"),
            ((("y", "y"),), "'y' is used 2 times"),
            ((None, None, None), "3 entries for a tensor of rank 2"),
            ((True,), "True is no axis name"),
            ((0.0,), "0.0 is no axis name"),
            ((("x", None),), "None is no axis name"),
            ((P("x"),), "is no axis name"),
            (P(P.UNCONSTRAINED), "UNCONSTRAINED leaves the axis open"),
            (P("x", unreduced={"y"}), r"unreduced axes \('y'\)"),
            (0, "a int is no spec"),
            ({"x": 0}, "a dict is no spec"),
            ("x", r"write \('x',\) or P\('x'\)"),
            ("{devices=[3]0,1,2}", "over 3 devices, not 8"),
            ("{devices=[8]<=[8]}", "rank 1, not 2"),
            ("{manual}", "by hand"),
        ],
        ids=repr,
    )
    def test_names_tensor_given_possible_and_fix(self, mesh, spec, what):
        for _ in range(2):  # the second time the caches are warm
            with pytest.raises(ShardingError, match=rf"^wte\.weight: .*{what}"):
                normalize_spec(spec, mesh, 2, name="wte.weight")

    def test_alike_is_not_equal(self, mesh):
        assert normalize_spec((1, 0), mesh, 2) == P("y", "x")
        with pytest.raises(SpecError, match="True is no axis name"):
            normalize_spec((True, False), mesh, 2)

    def test_all_faults_in_one(self, mesh):
        with pytest.raises(
            SpecError, match=r"called 'z'; .*axis 7 .*'x' is used 2 times; it has 4.*'x' \(2\)"
        ):
            normalize_spec(("z", 7, "x", "x"), mesh, 2)

    def test_uneven(self, mesh):
        with pytest.raises(UnevenError, match=r"w: shape \(6, 9\).*axis 0 has size 6.*4 shards"):
            normalize_spec(("y", None), mesh, 2, shape=(6, 9), name="w")
        match = r"axis 0 has size 3.*2 shards; axis 1 has size 9.*4 shards.*Pad them to 4 and 12"
        with pytest.raises(UnevenError, match=match):
            check_even(P("x", "y"), mesh, (3, 9))


class TestHelpers:
    def test_same_layout(self, mesh):
        a, b = NamedSharding(mesh, P("x", None)), NamedSharding(mesh, P("x"))
        assert a != b
        assert same_layout(a, b, 2)
        assert not same_layout(a, NamedSharding(mesh, P("y")), 2)

    def test_same_layout_over_abstract_meshes(self, mesh):
        one = NamedSharding(AbstractMesh((8, 1), ("x", "y")), P("x"))
        same = NamedSharding(AbstractMesh((8, 1), ("x", "y")), P("x", "y"))
        other = NamedSharding(AbstractMesh((8,), ("x",)), P("x"))
        assert same_layout(one, same, 2)
        assert not same_layout(one, other, 2)
        for held in (NamedSharding(mesh, P("x")), jax.numpy.ones(8).sharding):
            assert not same_layout(one, held, 2) and not same_layout(held, one, 2)

    def test_is_a_tree(self):
        for tree in ([P("x"), P()], (P(),), {"w": P()}, {}, [None, [P()]], 3, 0.5):
            assert not is_spec(tree)
