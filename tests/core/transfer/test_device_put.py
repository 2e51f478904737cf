import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core import frameworks
from isoshard.core.errors import CopyError, ShardingError, SpecError, UnevenError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Plan, PlanError
from isoshard.core.transfer import leaf_specs
from isoshard.core.transfer.device_put import full, reshard, shard, sharding_of


def ones(*shape):
    return np.ones(shape, np.float32)


def specs(tree):
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: object
    bias: object


class TestArrays:
    def test_numpy(self, mesh):
        host = np.arange(32, dtype=np.float32).reshape(8, 4)
        a = shard(host, mesh, P("x", "y"))
        assert isinstance(a, jax.Array)
        assert a.sharding == NamedSharding(mesh, P("x", "y"))
        np.testing.assert_array_equal(np.asarray(a), host)

    def test_jax_scalars_and_a_mesh_of_another_kind(self, mesh):
        class Theirs:
            def get_jax_mesh(self):
                return mesh

        a = shard(jax.numpy.arange(8), mesh, ("y",))
        assert a.sharding.spec == P("y")
        np.testing.assert_array_equal(np.asarray(a), np.arange(8))
        assert shard(ones(8), Theirs(), (0,)).sharding.spec == P("x")
        assert shard(np.float32(3), mesh, None).shape == ()

    def test_inside_jit_it_constrains(self, mesh):
        for copy in (None, True, False):
            program = jax.jit(lambda x, copy=copy: shard(x * 2, mesh, P(None, "y"), copy=copy))
            a = program(ones(8, 4))
            assert a.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "y")), 2)

    def test_no_array_and_uneven(self, mesh):
        for thing, fix in (("text", "load_safetensors"), (object(), "asarray"), (len, "asarray")):
            with pytest.raises(TypeError, match=f"w is a {type(thing).__name__}.*{fix}"):
                shard(thing, mesh, P(), name="w")
        with pytest.raises(UnevenError, match=r"wte: .*axis 0 has size 6.*4 shards"):
            shard(ones(6, 4), mesh, P("y"), name="wte")


class TestTrees:
    def test_one_spec(self, mesh):
        tree = {"a": [ones(8, 2), ones(8)], "b": (ones(2, 2, 2), None)}
        placed = shard(tree, mesh, ("x",))
        assert jax.tree.structure(placed) == jax.tree.structure(tree)
        assert set(jax.tree.leaves(specs(placed), is_leaf=lambda x: isinstance(x, P))) == {P("x")}

    def test_a_registered_class(self, mesh):
        placed = shard(Layer(ones(8, 4), ones(4)), mesh, Layer(P("x", "y"), P("y")))
        assert isinstance(placed, Layer)
        assert (placed.weight.sharding.spec, placed.bias.sharding.spec) == (P("x", "y"), P("y"))

    def test_a_tree_of_specs_may_stop_early(self, mesh):
        tree = {"block": {"w": ones(8, 4), "b": ones(8)}, "head": ones(4, 4), "none": None}
        placed = shard(tree, mesh, {"block": ("x",), "head": (None, 1), "none": None})
        assert specs(placed) == {
            "block": {"w": P("x"), "b": P("x")},
            "head": P(None, "y"),
            "none": None,
        }
        placed = shard([ones(8), ones(8)], mesh, [P("x"), P("y")])
        assert specs(placed) == [P("x"), P("y")]
        names = ("x", "y")  # one spec
        assert specs(shard([ones(8, 4), ones(8, 4)], mesh, names)) == [P(*names)] * 2
        placed = shard({"w": ones(8), "w2": ones(8)}, mesh, {"w": P("x"), "w2": P("y")})
        assert specs(placed) == {"w": P("x"), "w2": P("y")}
        assert shard({}, mesh, P("x")) == {} and shard([None], mesh, {}) == [None]

    def test_the_trees_do_not_match(self, mesh):
        with pytest.raises(
            SpecError, match=r"params: .*no spec for b; c has a spec.*The leaves are a, b"
        ):
            shard({"a": ones(8), "b": ones(8)}, mesh, {"a": P(), "c": P()}, name="params")
        with pytest.raises(SpecError, match="a is a int, not a spec"):
            shard({"a": ones(8)}, mesh, {"a": 3})

    def test_all_faults_at_once_and_nothing_done(self, mesh, counted, monkeypatch):
        monkeypatch.setattr(leaf_specs, "narrowed_to_jax", None)
        tree = {"a": ones(3), "b": [ones(8, 8), ones(4)], "c": np.full(8, 1 << 40)}
        wanted = {"a": P("x"), "b": [P(None, "z"), P("x")], "c": P("x")}
        with pytest.raises(
            ShardingError, match=r"(?s)3 leaves.*net\.a: .*size 3.*net\.b\.0: .*'z'.*net\.c: int64"
        ):
            shard(tree, mesh, wanted, name="net")
        assert counted("copies") == 0

    def test_copy_false_is_checked_before_anything_moves(self, mesh, counted):
        tree = {"a": jax.numpy.ones(8), "b": ones(8, 8)[:, ::2]}
        with pytest.raises(CopyError, match=r"(?s)2 leaves.*a: .*must move.*b: .*not contiguous"):
            shard(tree, mesh, P("x"), copy=False)


class TestPlans:
    def test_by_name(self, mesh):
        tree = {"blocks": [{"w": ones(8, 4), "b": ones(4)}], "head": ones(4, 8)}
        plan = Plan({"blocks.*.w": P("x", "y"), "*.b": None, "head": (None, 0)})
        assert specs(shard(tree, mesh, plan)) == {
            "blocks": [{"w": P("x", "y"), "b": P()}],
            "head": P(None, "x"),
        }
        assert specs(shard({"w": ones(8)}, mesh, Plan({"w": P("x")}), name="net")) == {"w": P("x")}
        assert shard(ones(8), mesh, Plan({"wte": P("x")}), name="wte").sharding.spec == P("x")

    def test_faults_are_the_plans(self, mesh):
        with pytest.raises(PlanError, match=r"(?s)2 leaves do not fit.*a: .*'z'.*b: .*'z'"):
            shard({"a": ones(8), "b": ones(8)}, mesh, Plan({"*": P("z")}))
        with pytest.raises(SpecError, match=r"several leaves are called a\.b"):
            shard({"a.b": ones(8), "a": {"b": ones(4)}}, mesh, Plan({"*": P("x")}))


class TestReshard:
    def test_on_its_own_mesh(self, mesh):
        a = shard(np.arange(32, dtype=np.int32).reshape(8, 4), mesh, P("x"))
        b = reshard(a, (None, "y"))
        assert b.sharding == NamedSharding(mesh, P(None, "y"))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        flat = make_mesh((8,), ("all",))
        assert reshard(a, NamedSharding(flat, P("all"))).sharding.mesh == flat
        tree = shard({"a": ones(8), "b": ones(8)}, mesh, P("x"))
        assert specs(reshard(tree, {"a": P(), "b": P("y")})) == {"a": P(), "b": P("y")}

    def test_from_one_device(self, mesh):
        with pytest.raises(ShardingError, match=r"no mesh.*iso\.reshard\(x, mesh, spec\)"):
            reshard(jax.numpy.ones(8), P("x"))
        assert reshard(jax.numpy.ones(8), mesh, P("x")).sharding.spec == P("x")

    def test_two_meshes(self, mesh):
        flat = make_mesh((8,), ("x",), axis_types=AxisType.Auto)
        tree = {"a": [shard(ones(8), mesh, P())], "b": shard(ones(8), flat, P()), "step": 3}
        kind = mesh.axis_types[0].name
        with pytest.raises(
            ShardingError,
            match=rf"2 different meshes: a\.0 on 'x' \(2\), 'y' \(4\) \({kind}\) of devices 0, .*; "
            r"b on 'x' \(8\) \(Auto\) of devices .*\. Choose one.*iso\.reshard\(x, mesh, spec\)",
        ):
            reshard(tree, P("x"))
        assert specs(reshard({**tree, "step": ones(8)}, mesh, P("x")))["b"] == P("x")

    @pytest.mark.parametrize(
        "call",
        [
            lambda x, mesh: reshard(x, P("y"), mesh),
            lambda x, mesh: reshard(x, P("y"), mesh=mesh),
            lambda x, mesh: reshard(x, P("y"), None),
            lambda x, mesh: reshard(x, NamedSharding(mesh, P("y")), mesh),
        ],
    )
    def test_the_old_order_warns(self, mesh, call):
        x = shard(ones(8), mesh, P("x"))
        said = r"^reshard\(x, spec, mesh\) is now reshard\(x, mesh, spec\); "
        with pytest.warns(DeprecationWarning, match=said) as caught:
            moved = call(x, mesh)
        assert moved.sharding == NamedSharding(mesh, P("y"))
        assert caught[0].filename == __file__

    def test_the_mesh_may_be_left_out(self, mesh):
        x = shard(ones(8), mesh, P("x"))
        for moved in (
            *(reshard(x, P("y")), reshard(x, spec=P("y")), reshard(x, None, P("y"))),
            *(reshard(x, mesh, P("y")), reshard(x, mesh=mesh, spec=P("y"))),
        ):
            assert moved.sharding == NamedSharding(mesh, P("y"))
        assert reshard(x, None).sharding.spec == P() == reshard(x, mesh, None).sharding.spec

    def test_a_spec_is_needed(self, mesh):
        with pytest.raises(
            TypeError, match=r"iso\.reshard needs a spec: iso\.reshard\(x, P\('x'\)\)"
        ):
            reshard(ones(8))
        with pytest.raises(TypeError, match=r"there is no spec for the mesh 'x' \(2\)"):
            reshard(ones(8), mesh)


class TestFull:
    def test_gathers_and_counts(self, mesh, counted):
        a = shard(np.arange(8, dtype=np.float32), mesh, P("x"))
        whole = full(a)
        assert whole.sharding == NamedSharding(mesh, P())
        assert counted("gathers") == 1
        np.testing.assert_array_equal(np.asarray(whole), np.arange(8))
        made = full({"a": a, "b": shard(ones(8), mesh, P("y"))})
        assert specs(made) == {"a": P(), "b": P()} and counted("gathers") == 3
        for a in (whole, jax.numpy.ones(3)):
            assert full(a) is a
        assert counted("gathers") == 3
        with pytest.raises(TypeError, match=r"full takes arrays.*a is ndarray.*iso\.shard"):
            full({"a": ones(3)})


class TestShardingOf:
    def test_an_explicit_mesh_is_reported_as_it_is(self, mesh):
        explicit = Mesh(mesh.devices, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
        a = jax.device_put(ones(8), NamedSharding(explicit, P("x")))
        assert sharding_of(a).mesh == explicit

    def test_one_device(self):
        a = jax.device_put(ones(3), jax.devices()[5])
        assert sharding_of(a).mesh.devices.tolist() == [jax.devices()[5]]
        assert sharding_of(a).spec == P()
        assert sharding_of(a).is_equivalent_to(a.sharding, 1)
        assert sharding_of({"b": [a]})["b"][0] == sharding_of(a)

    def test_numpy_and_traced(self, mesh):
        with pytest.raises(TypeError, match="sharding_of takes arrays on devices"):
            sharding_of(ones(3))
        with pytest.raises(ShardingError, match="the compiler chooses it"):
            jax.jit(sharding_of)(ones(3))


class Cube:
    """An array of a framework that core does not know."""

    def __init__(self, data, spec=None):
        self.data, self.spec, self.shape, self.dtype = data, spec, data.shape, data.dtype


class Cubes(frameworks.Framework):
    name = "cubes"

    def owns(self, obj):
        return isinstance(obj, Cube)

    def check_shard(self, x, mesh, spec, *, copy=None, name=None):
        if x.data.size > 100:
            raise CopyError(f"{name}: too big")

    def shard(self, x, mesh, spec, *, copy=None, name=None):
        return Cube(x.data, (name, spec, copy))

    def reshard(self, x, mesh, spec):
        return Cube(x.data, spec)

    def full(self, x):
        return Cube(x.data, "full")

    def sharding_of(self, x):
        return x.spec


class TestFrameworks:
    @pytest.fixture(autouse=True)
    def cubes(self):
        frameworks.register(Cubes())
        yield
        frameworks.unregister("cubes")

    def test_same_framework_out(self, mesh):
        made = shard(Cube(ones(8)), mesh, ("x",), copy=True, name="c")
        assert made.spec == ("c", ("x",), True)
        assert reshard(made, P("y")).spec == P("y")
        assert full(made).spec == "full"
        assert sharding_of(made) == made.spec

    def test_as_a_leaf(self, mesh):
        tree = {"a": ones(8), "c": Cube(ones(8))}
        made = shard(tree, mesh, {"a": P("x"), "c": P("y")})
        assert made["a"].sharding.spec == P("x")
        assert made["c"].spec == ("c", P("y"), None)
        assert sharding_of(made) == {"a": NamedSharding(mesh, P("x")), "c": made["c"].spec}
        assert full(made)["c"].spec == "full"
        made = shard({"c": Cube(ones(8))}, mesh, Plan({"c": ("y",)}))
        assert made["c"].spec == ("c", P("y"), None)

    def test_its_faults_are_collected(self, mesh):
        with pytest.raises(ShardingError, match=r"(?s)2 leaves.*a: .*'z'.*c: too big"):
            shard({"a": ones(8), "c": Cube(ones(200))}, mesh, P("z"))
