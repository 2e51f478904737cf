import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoshard.core.errors import CopyError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.spec import named_sharding
from isoshard.core.runtime import metrics
from isoshard.core.transfer.exchange import (
    aligned_empty,
    check_shareable,
    device_dtype,
    host_to_jax,
    reshard_array,
    to_jax,
)
from tests.calls import calls_of

SHAREABLE = [
    np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint32, np.float16, np.float32,
    np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip


def host_array(shape, dtype=np.float32, past=0):
    """Values counting up (mod 2 for bool), `past` bytes past a 64-byte boundary."""
    count = int(np.prod(shape))
    raw = aligned_empty((count * np.dtype(dtype).itemsize + past,), np.uint8)[past:]
    host = raw.view(dtype).reshape(shape)
    host[...] = (np.arange(count).reshape(shape) % 100).astype(dtype)
    return host


def shared(array, host):
    """Per device, whether its shard lies in the memory of `host`."""
    base = host.__array_interface__["data"][0]
    found = []
    for piece in array.addressable_shards:
        starts = [part.start or 0 for part in piece.index]
        offset = sum(a * b for a, b in zip(starts, host.strides, strict=True))
        found.append(piece.data.unsafe_buffer_pointer() == base + offset)
    return found


def pointers(array):
    return [piece.data.unsafe_buffer_pointer() for piece in array.addressable_shards]


class TestSharing:
    def test_rows_are_shared(self, mesh, counted):
        for dtype in SHAREABLE:
            host = host_array((64, 64), dtype)
            a = host_to_jax(host, named_sharding((("x", "y"),), mesh, 2), copy=False)
            assert all(shared(a, host)), dtype
            assert a.dtype == dtype
            np.testing.assert_array_equal(np.asarray(a), host)
            number = host_array((), dtype)
            assert all(shared(to_jax(number, named_sharding((), mesh, 0), copy=False), number))
        assert counted("copies") == counted("copied_bytes") == 0
        assert not any(shared(to_jax(number, named_sharding((), mesh, 0), copy=True), number))

    def test_replicas_read_only_memory_and_slices_of_one_row(self, mesh):
        host = host_array((4, 16))
        host.flags.writeable = False
        assert all(shared(host_to_jax(host, named_sharding(None, mesh, 2), copy=False), host))
        eighths = host_array((64, 16))[::8]
        sharding = named_sharding(("x",), make_mesh((8,), ("x",)), 2)
        assert all(shared(to_jax(eighths, sharding, copy=False), eighths))

    def test_it_is_the_same_work_whatever_the_size(self, mesh):
        sharding = named_sharding((("x", "y"), None), mesh, 2)
        small, large = (
            aligned_empty((megabytes << 8, 1 << 10), np.float32) for megabytes in (1, 64)
        )
        bare = calls_of(lambda: jax.device_put(large, sharding))
        work = calls_of(lambda: to_jax(large, sharding, copy=False))
        assert work == calls_of(lambda: to_jax(small, sharding, copy=False))
        assert work < 2 * bare

    def test_a_later_write_shows_and_donation_leaves_the_memory_alone(self, mesh):
        host = host_array((8, 16))
        a = to_jax(host, named_sharding(("x",), mesh, 2))
        host[7, 15] = -1
        want = host.copy()
        assert np.asarray(a)[7, 15] == -1
        jax.jit(lambda x: x + 1, donate_argnums=0)(a).block_until_ready()
        np.testing.assert_array_equal(host, want)

    def test_shared_memory_outlives_the_host_array(self, mesh):
        host = host_array((8, 1 << 16))
        want = host.copy()
        a = to_jax(host, named_sharding(("x",), mesh, 2), copy=False)
        del host
        np.testing.assert_array_equal(np.asarray(a), want)

    def test_empty(self, mesh, counted):
        a = to_jax(np.empty((0, 3), np.float32), named_sharding(("y",), mesh, 2), copy=False)
        assert a.shape == (0, 3)
        assert counted("copies") == 0
        assert to_jax(np.empty((0,), np.int64)).dtype == np.int32

    def test_without_a_sharding_the_default_device_is_not_committed_to(self, mesh):
        host = host_array((16,))
        a = to_jax(host, copy=False)
        assert shared(a, host) == [True]
        placed = to_jax(host_array((16,)), named_sharding(("y",), mesh, 1))
        assert (a + placed).sharding.is_equivalent_to(placed.sharding, 1)


class TestCopies:
    @pytest.mark.parametrize(
        ("host", "spec", "why"),
        [
            (host_array((8, 16)), (None, "y"), r"slice \[0:8, 0:4\] of device 0 is not contiguous"),
            (host_array((8, 16)).T, (), r"slice \[0:16, 0:8\] of device 0 is not contiguous"),
            (host_array((8, 16))[::-1], ("x",), "not contiguous"),
            (np.broadcast_to(host_array((1, 16)), (8, 16)), (), "not contiguous"),
            (host_array((8, 16), past=16), ("x",), "starts 16 bytes past a 64-byte boundary"),
            (host_array((4, 4)), ("y",), r"\[1:2, 0:4\] of device 1 starts 16 bytes past"),
            (host_array((), past=4), (), r"slice \[\] of device 0 starts 4 bytes past"),
            (host_array((8, 8), ml_dtypes.int4), (), "int4 takes a byte each"),
            (np.zeros((8, 8), np.int64), (), "int64 is stored as int32 while jax_enable_x64"),
            (np.zeros((8, 8), np.uint64), (), "uint64 is stored as uint32"),
        ],
    )
    def test_refused_with_the_reason(self, mesh, counted, host, spec, why):
        sharding = named_sharding(spec, mesh, host.ndim)
        with pytest.raises(CopyError, match=rf"w: cannot share .*{why}.*Pass copy=None"):
            host_to_jax(host, sharding, copy=False, name="w")
        with pytest.raises(CopyError, match=why):
            check_shareable(host, sharding, copy=False)
        assert counted("copies") == 0
        a = host_to_jax(host, sharding)
        assert not all(shared(a, host))
        assert counted("copies") > 0
        np.testing.assert_array_equal(np.asarray(a), host)

    def test_only_the_copied_slices_are_counted(self, mesh, counted):
        host = host_array((4, 4))  # rows of 16 bytes: the first starts on the boundary
        a = to_jax(host, named_sharding(("y",), mesh, 2))
        assert shared(a, host) == [True, False, False, False] * 2
        assert (counted("copies"), counted("copied_bytes")) == (6, 6 * 16)

    @pytest.mark.parametrize(("spec", "past"), [(("x",), 0), ((None, "y"), 16), ((), 16)])
    def test_a_copy_is_private_and_finished(self, mesh, counted, spec, past):
        host = host_array((512, 1024), past=past)
        want = host.copy()
        a = to_jax(host, named_sharding(spec, mesh, 2), copy=True)
        low, high = host.ctypes.data, host.ctypes.data + host.nbytes
        assert not any(low <= pointer < high for pointer in pointers(a))
        host[...] = -1
        np.testing.assert_array_equal(np.asarray(a), want)
        assert counted("copies") >= 1
        assert counted("copied_bytes") >= host.nbytes

    @settings(deadline=None, max_examples=30)
    @given(
        rows=st.sampled_from([8, 16, 64]),
        columns=st.sampled_from([1, 4, 16, 64]),
        past=st.sampled_from([0, 4, 32, 64]),
        step=st.sampled_from([1, 2]),
        spec=st.sampled_from([(), ("x",), ("y",), (("y", "x"),), (None, "x"), ("x", "y")]),
    )
    def test_the_rule_predicts_what_jax_does(self, rows, columns, past, step, spec):
        mesh = make_mesh((2, 2), ("x", "y"))
        host = host_array((rows * step, columns * 4), past=past)[::step]
        sharding = named_sharding(spec, mesh, 2)
        metrics.reset()
        a = to_jax(host, sharding)
        copied = shared(a, host).count(False)
        assert metrics.counters()["copies"] == copied
        piece = np.prod(sharding.shard_shape(host.shape)) * 4
        assert metrics.counters()["copied_bytes"] == copied * piece
        if copied:
            with pytest.raises(CopyError):
                to_jax(host, sharding, copy=False)
        else:
            to_jax(host, sharding, copy=False)


class TestDtypes:
    def test_int64(self, mesh, counted):
        host = np.array([-(2**31), 0, 1, 2**31 - 1])
        a = to_jax(host, named_sharding(("y",), mesh, 1))
        assert a.dtype == np.int32
        np.testing.assert_array_equal(np.asarray(a), host)
        assert counted("copied_bytes") > 0
        for copy, value in ((None, 2**31), (True, -(2**31) - 1)):
            with pytest.raises(
                CopyError, match=r"ids: int64 .*do not fit -2147483648\.\.2147483647.*x64"
            ):
                to_jax(np.array([0, value]), named_sharding(("x",), mesh, 1), copy=copy, name="ids")

    @pytest.mark.parametrize("dtype", ["float64", "complex128", "int64", "uint64"])
    def test_at_the_door_they_are_narrowed_as_by_jax(self, mesh, counted, dtype):
        host = (np.arange(16) / 3).reshape(8, 2).astype(dtype)
        for sharding in (None, named_sharding(("x", "y"), make_mesh((4, 2), ("x", "y")), 2)):
            a = to_jax(host, sharding)
            assert a.dtype == jax.numpy.asarray(host).dtype
            np.testing.assert_array_equal(a, jax.numpy.asarray(host))
        assert (counted("narrowed"), counted("narrowed_bytes")) == (2, host.nbytes)
        with pytest.raises(CopyError, match=rf"w: cannot share .*{dtype} is stored as .*32|64"):
            to_jax(host, copy=False, name="w")
        if dtype in ("float64", "complex128"):
            for copy in (None, True, False):
                match = rf"w: {dtype} would lose precision, as jax_enable_x64"
                with pytest.raises(CopyError, match=match):
                    host_to_jax(host, None, copy=copy, name="w")

    def test_a_double_beyond_the_range_is_infinite_as_in_jax(self):
        with pytest.warns(RuntimeWarning, match="overflow"):
            assert to_jax(np.array([1e300, -1e300])).tolist() == [np.inf, -np.inf]

    def test_64_bits_with_x64(self, mesh, x64):
        for dtype in ("int64", "uint64", "float64", "complex128"):
            host = host_array((8, 8), dtype)
            a = to_jax(host, named_sharding(("x",), mesh, 2), copy=False)
            assert a.dtype == dtype
            assert all(shared(a, host))

    def test_no_number(self):
        for dtype in ("O", "U3", "datetime64[s]", "i4,f4", ">i4"):
            with pytest.raises(CopyError, match=r"names: JAX has no dtype .*byte order"):
                device_dtype(np.dtype(dtype), "names")


class TestJaxArrays:
    def test_the_same_layout_is_shared_and_moving_is_refused(self, mesh):
        a = to_jax(host_array((8, 16)), named_sharding(("x",), mesh, 2))
        for copy in (None, False):
            assert pointers(to_jax(a, copy=copy)) == pointers(a)
            assert pointers(reshard_array(a, a.sharding, copy=copy)) == pointers(a)
        with pytest.raises(CopyError, match=r"w: .*must move from .*P\('x'.*to .*'y'"):
            to_jax(a, named_sharding((None, "y"), mesh, 2), copy=False, name="w")

    @pytest.mark.parametrize(
        ("source", "spec"), [(("x",), ("x",)), (("x",), (None, "y")), ((), ()), (None, ())]
    )
    def test_a_copy_is_private(self, mesh, source, spec):
        a = jax.numpy.arange(128.0).reshape(8, 16)
        if source is not None:
            a = to_jax(host_array((8, 16)), named_sharding(source, mesh, 2), copy=True)
        b = to_jax(a, named_sharding(spec, mesh, 2), copy=True)
        assert not set(pointers(a)) & set(pointers(b))
        assert pointers(to_jax(a, copy=True)) != pointers(a)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    def test_traced(self, mesh):
        sharding = named_sharding((None, "y"), mesh, 2)
        a = jax.jit(lambda x: to_jax(to_jax(x) + 1, sharding))(np.ones((8, 16), np.float32))
        assert a.sharding.is_equivalent_to(sharding, 2)


def test_containers():
    made = to_jax({"a": [np.ones(2)], "b": (np.zeros(1, np.int32),), "step": 3, "rates": [1.0]})
    assert made["a"][0].dtype == np.float32 and isinstance(made["b"][0], jax.Array)
    assert (made["step"], made["rates"]) == (3, [1.0])
    assert to_jax(3).weak_type and to_jax([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(CopyError, match=r"^a\.0: int64"):
        to_jax({"a": [np.full(2, 1 << 40)]})
    for thing in ("text", object()):
        with pytest.raises(TypeError, match="to_jax takes a NumPy array"):
            to_jax(thing)


def test_aligned_empty():
    for shape, dtype in itertools.product([(), (3,), (0, 2), (5, 7)], ["float32", "int8"]):
        made = aligned_empty(shape, dtype)
        assert (made.shape, made.dtype) == (shape, dtype)
        assert made.size == 0 or made.ctypes.data % 64 == 0
        assert made.flags.c_contiguous
