"""What is taken for an array as `jnp.asarray` takes it, and what stays what it is in a tree."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import CopyError, ShardingError, SpecError
from isoshard.core.plan import Plan
from isoshard.core.transfer.array_like import is_literal

NUMBERS = [2.5, 3, True, 1 + 2j]
LISTS = [
    [1.0, 2.0],
    [1, 2],
    (1, 2.5),
    [[1, 2], (3, 4)],
    [True, False],
    [True, 2],
    [np.float32(1), 2],
    [np.int32(1), np.int16(2)],
    [np.float64(1), 2],
    [1j, 2],
]


def like_jax(got, value):
    want = jnp.asarray(value)
    assert (got.dtype, got.weak_type, got.shape) == (want.dtype, want.weak_type, want.shape)
    np.testing.assert_array_equal(got, want)


class TestAlone:
    def test_numbers_and_lists_are_arrays(self, mesh):
        for value in NUMBERS + LISTS:
            got = iso.shard(value, mesh, P())
            assert got.sharding == NamedSharding(mesh, P())
            like_jax(got, value)
            like_jax(iso.to_jax(value), value)
            like_jax(iso.reshard(value, mesh, P()), value)
        for value in LISTS:
            like_jax(iso.from_local(value, mesh, P()), value)
        assert iso.from_local(3, mesh, P()).dtype == np.int32
        assert iso.shard([1.0, 2.0], mesh, P("x")).sharding.spec == P("x")

    def test_with_64_bits(self, mesh, x64, counted):
        for value in NUMBERS + LISTS:
            like_jax(iso.shard(value, mesh, P()), value)
        assert counted("narrowed") == 0
        for value in (1 << 64, [1, 1 << 64]):
            with pytest.raises(
                CopyError, match=r"(?m)ids: .*does not fit 64 bits\. Make it a float\.$"
            ):
                iso.shard(value, mesh, P(), name="ids")

    def test_what_raises(self, mesh):
        for value in (1 << 40, [1 << 40], [-(1 << 31) - 1], np.array([1 << 40])):
            with pytest.raises(CopyError, match=r"ids: .*not fit.*jax_enable_x64"):
                iso.shard(value, mesh, P(), name="ids")
        for value in (3, [1.0, 2.0], np.ones(8), np.arange(8)):
            for verb in (iso.shard, iso.from_local):
                with pytest.raises(CopyError, match="w: cannot share memory under copy=False"):
                    verb(value, mesh, P(), copy=False, name="w")
            with pytest.raises(CopyError, match="w: cannot share memory under copy=False"):
                iso.to_jax(value, copy=False, name="w")
        with pytest.raises(TypeError, match="rows: a list of numbers whose rows differ in length"):
            iso.shard([[1, 2], [3]], mesh, P(), name="rows")

    @pytest.mark.parametrize(("dtype", "copy"), [("float64", None), ("int64", True)])
    def test_64_bits_become_32(self, mesh, counted, dtype, copy):
        host = (np.arange(32) / 3).reshape(8, 4).astype(dtype)
        like_jax(iso.shard(host, mesh, P("x", "y"), copy=copy), host)
        assert (counted("narrowed"), counted("narrowed_bytes")) == (1, host.nbytes // 2)
        like_jax(iso.from_local(host, mesh, P("x", "y"), copy=copy), host)
        iso.shard(np.ones((8, 4), np.float32), mesh, P("x"))
        assert counted("narrowed") == 2

    def test_padded(self, mesh, counted):
        host = np.arange(10) / 3
        want = iso.shard(host.astype(np.float32), mesh, P("y"), uneven="pad")
        assert counted("narrowed") == 0
        got = iso.shard(host, mesh, P("y"), uneven="pad")
        np.testing.assert_array_equal(got.array, want.array)
        assert counted("narrowed") == 1
        tree = iso.shard({"a": np.arange(10) / 3, "n": 2}, mesh, P("y"), uneven="pad")
        assert tree["n"] == 2
        assert iso.shard([1.0, 2.0, 3.0], mesh, P("y"), uneven="pad").shape == (3,)

    def test_in_jit_host_data_is_a_constant(self, mesh):
        host = np.arange(64.0).reshape(8, 8)
        got = jax.jit(lambda: iso.shard(host.T, mesh, P("x", "y")))()
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
        np.testing.assert_array_equal(got, host.T)
        with pytest.raises(CopyError, match="a traced program takes its own copy"):
            aligned = iso.core.transfer.exchange.aligned_empty((8, 8), np.float32)
            jax.jit(lambda: iso.shard(aligned, mesh, P("x"), copy=False))()


def test_what_reads_as_numbers():
    class Pair(NamedTuple):
        a: float
        b: float

    for value in (3, [1], ((1, 2), [3, 4]), [[1, 2], [3]]):
        assert is_literal(value)
    for value in ([], [[]], [1, []], [None], [1, "a"], [1, np.ones(1)], Pair(1, 2), {"a": 1}, "1"):
        assert not is_literal(value)
    assert not is_literal(np.float32(1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: object
    params: object
    opt_state: object
    apply_fn: object
    name: str | None = None


def state(step=0):
    params = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
    return State(step, params, optax.adam(1e-3).init(params), len, "net")


class TestInATree:
    def test_what_is_no_array_stays_what_it_is(self, mesh):
        function = functools.partial(max, 0)
        tree = {
            "w": np.ones(8, np.float32),
            "step": 3,
            "rate": 0.5,
            "flag": True,
            "name": "net",
            "f": function,
            "none": None,
            "sizes": [1, 2],
            "dtype": np.dtype("int8"),
        }
        got = iso.shard(tree, mesh, P("x"))
        assert got["w"].sharding == NamedSharding(mesh, P("x"))
        assert {**got, "w": None} == {**tree, "w": None}
        assert type(got["step"]) is int and got["f"] is function
        count = iso.shard({"count": np.int32(3)}, mesh, P())["count"]
        assert isinstance(count, jax.Array) and count.dtype == np.int32
        alike = iso.reshard(got, P("y"))
        assert alike["w"].sharding.spec == P("y") and alike["name"] == "net"
        assert iso.full(alike)["w"].sharding.spec == P() and iso.full(alike)["step"] == 3
        assert iso.sharding_of(got) == {
            **dict.fromkeys(tree),
            "w": NamedSharding(mesh, P("x")),
            "sizes": [None, None],
        }

    @pytest.mark.parametrize("spec", ["plan", "tree"])
    def test_a_whole_state(self, mesh, spec):
        rules = {"*.w": P("x", "y"), "*": P()}
        layouts = {
            "plan": Plan(rules),
            "tree": State(None, {"w": P("x", "y"), "b": P()}, P(), None, None),
        }
        got = iso.shard(state(), mesh, layouts[spec])
        assert (got.step, got.apply_fn, got.name) == (0, len, "net")
        assert got.params["w"].sharding == NamedSharding(mesh, P("x", "y"))
        assert got.opt_state[0].count.sharding == NamedSharding(mesh, P())
        want = P("x", "y") if spec == "plan" else P()
        assert got.opt_state[0].mu["w"].sharding == NamedSharding(mesh, want)
        again = iso.shard(state(5), mesh, iso.sharding_of(got))  # its layouts lay out another
        assert again.step == 5 and iso.sharding_of(again) == iso.sharding_of(got)

    def test_what_stays_needs_no_spec_and_may_not_be_split(self, mesh):
        tree = {"w": np.ones(8, np.float32), "step": 3}
        for specs in ({"w": P("x")}, {"w": P("x"), "step": None}, {"w": P("x"), "step": P()}):
            assert iso.shard(tree, mesh, specs)["step"] == 3
        with pytest.raises(SpecError, match=r"step is a int, no array, and has spec P\('x',\)"):
            iso.shard(tree, mesh, {"w": P("x"), "step": P("x")})

    def test_arrays_in_disguise_are_not_passed_over(self, mesh):
        class Layer:
            def __init__(self):
                self.weight = np.ones(3)

        class Lazy:
            shape, dtype = (3,), np.dtype("float32")

        for verb in (lambda x: iso.shard(x, mesh, P()), iso.full, iso.sharding_of):
            with pytest.raises(TypeError, match=r"m.* is .*Layer.*; n.* is .*Lazy"):
                verb({"m": Layer(), "n": Lazy()})
        with pytest.raises(TypeError, match=r"m is a Layer, no pytree, and has arrays \(weight\)"):
            iso.shard({"m": Layer()}, mesh, P())

    def test_local_data(self, mesh):
        tree = {"w": np.ones((8, 4)), "step": 3}
        for shape in (None, {"w": (8, 4), "step": None}):
            got = iso.from_local(tree, mesh, {"w": P("x"), "step": None}, shape=shape)
            assert got["step"] == 3
            assert got["w"].sharding == NamedSharding(mesh, P("x"))
        with pytest.raises(ShardingError, match="is not the global shape of each of w"):
            iso.from_local(tree, mesh, P("x"), shape={"w": (8, 4), "step": (1,)})

    def test_batches(self, mesh, counted):
        source = [{"x": np.arange(8) / 3, "n": 2.5}]
        [batch] = iso.data.loader(source, mesh, {"x": P("x"), "n": P()})
        like_jax(batch["x"], source[0]["x"])
        assert batch["n"].dtype == np.float32
        assert counted("narrowed") == 2
        [batch] = iso.data.loader([[1.0, 2.0]], mesh, P("x"))
        assert batch.tolist() == [1.0, 2.0]

    def test_a_torch_batch_is_not_rounded(self, mesh):
        pytest.importorskip("torch")
        with pytest.raises(CopyError, match=r"batch\.x: float64 would lose precision"):
            list(iso.data.loader([{"x": np.ones(8)}], mesh, P("x"), framework="torch"))
        with pytest.raises(CopyError, match="float64 would lose precision"):
            iso.to_torch(np.ones(8))
