import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core import frameworks
from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.shards import Shard, local_shards
from isoshard.core.transfer.device_put import shard


def test_pieces_share_the_array(mesh):
    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    a = shard(host, mesh, P("x", "y"))
    own = {piece.device: piece.data.unsafe_buffer_pointer() for piece in a.addressable_shards}
    pieces = local_shards(a)
    assert [piece.device for piece in pieces] == list(mesh.devices.flat)
    for piece in pieces:
        assert piece.data.unsafe_buffer_pointer() == own[piece.device]
        np.testing.assert_array_equal(np.asarray(piece.data), host[piece.index])


def test_replicas_are_numbered(mesh):
    pieces = local_shards(shard(np.ones(8, np.float32), mesh, P("x")))
    assert [piece.replica_id for piece in pieces] == [0, 1, 2, 3] * 2


def test_mesh_order_is_kept_when_devices_are_turned():
    turned = make_mesh((8,), ("x",), devices=jax.devices()[::-1])
    pieces = local_shards(shard(np.arange(8, dtype=np.int32), turned, P("x")))
    assert [int(piece.data[0]) for piece in pieces] == list(range(8))
    assert pieces[0].device == jax.devices()[7]


class Fake(frameworks.Framework):
    """Converts pieces to tuples, and notes how it was asked."""

    name = "torch"

    def owns(self, obj):
        return isinstance(obj, Wrapped)

    def local_shards(self, x):
        return ["mine"]

    def to_jax(self, x, sharding=None, *, copy=None):
        assert copy is False
        return x.array

    def shard_from_jax(self, array, *, copy=None):
        return ("torch", copy, array.unsafe_buffer_pointer())


class Wrapped:
    def __init__(self, array):
        self.array = array


def test_other_frameworks(mesh, monkeypatch):
    monkeypatch.setattr(frameworks, "_frameworks", {"torch": Fake()})
    a = shard(np.ones(8, np.float32), mesh, P("x"))
    pieces = local_shards(a, "torch")
    assert isinstance(pieces[0], Shard)
    assert pieces[3].data == ("torch", False, local_shards(a)[3].data.unsafe_buffer_pointer())
    assert local_shards(Wrapped(a), "torch") == ["mine"]
    assert len(local_shards(Wrapped(a))) == 8


def test_no_array(mesh):
    with pytest.raises(TypeError, match=r"not a ndarray.*iso\.shard"):
        local_shards(np.ones(3))
    with pytest.raises(TypeError, match=r"not a dict.*jax\.tree\.map"):
        local_shards({"a": jax.numpy.ones(3)})
    with pytest.raises(ShardingError, match="outside jit"):
        jax.jit(local_shards)(np.ones(3, np.float32))
    with pytest.raises(ShardingError, match="'jax' or 'torch' data, not as 'flax'"):
        local_shards(jax.numpy.ones(3), "flax")
    (piece,) = local_shards(jax.numpy.arange(3))  # on one device
    assert piece.index == (slice(None),)
