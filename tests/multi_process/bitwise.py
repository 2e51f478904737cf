"""What the jobs on core compare with: random bits, meshes over four devices, NumPy's slices."""

from __future__ import annotations

import contextlib
import re

import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import isoshard as iso

DTYPES = [
    np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint8,
    np.int32, np.bool_, np.complex64,
]  # fmt: skip
SPECS = [
    P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P("y", "x"), P(("x", "y")), P(("y", "x")),
    P(None, ("x", "y")),
]  # fmt: skip


def meshes():
    """Axes that cross processes, or not, or both do: four devices in all."""
    import jax

    devices = np.array(jax.devices(), object)
    orders = ([0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1], [3, 1, 0, 2])
    return [iso.make_mesh((2, 2), ("x", "y"), devices=list(devices[order])) for order in orders]


def values(shape, dtype, seed=0):
    """Random bits of a dtype at a 64-byte boundary: NaNs with payloads and -0.0 among them."""
    from isoshard.core.transfer.host_memory import aligned_empty

    host = aligned_empty(shape, dtype)
    raw = np.random.default_rng(seed).integers(0, 256, host.nbytes, np.uint8)
    host.reshape(-1).view(np.uint8)[:] = raw % 2 if dtype == np.bool_ else raw
    return host


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def assert_holds(array, host):
    """Every piece here is NumPy's slice, and there is one for each of this process's devices."""
    import jax

    assert array.shape == host.shape
    assert array.dtype == host.dtype
    pieces = iso.local_shards(array)
    mesh = iso.sharding_of(array).mesh
    own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    assert [piece.device for piece in pieces] == own
    for piece in pieces:
        assert bits(piece.data) == bits(host[piece.index]), (array.sharding, piece.index)


@contextlib.contextmanager
def raising(kind, match):
    try:
        yield
    except kind as error:
        assert re.search(match, str(error)), f"{match!r} is not in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def counted(name):
    return iso.metrics.counters()[name]
