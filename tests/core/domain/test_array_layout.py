import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.domain.blocks.array_layout import layout_of
from isoshard.core.errors import ShardingError, SpecError, UnevenError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.place import shard


def test_a_traced_value_is_told_how_it_lies(mesh):
    found = []

    def look(x):
        found.append(layout_of(x, mesh, ("x", None, ("y",))))
        return x

    jax.jit(look)(jnp.zeros((4, 3, 8)))
    (layout,) = found
    assert layout.names == (("x",), (), ("y",))
    assert layout.sizes == ((2, 2), (3,), (2, 2, 2, 2))
    assert layout.manual((0,)) == (P(None, None, ("y",)), {"y"})


def test_a_sharding_brings_its_mesh(mesh):
    assert layout_of(jnp.zeros(8), spec=NamedSharding(mesh, P("y"))).sizes == ((2, 2, 2, 2),)


def test_padding_without_a_split(mesh):
    x = UnevenArray(shard(np.zeros((8, 4), np.float32), mesh, ("y",)), (8, 3), (None, (3,)))
    layout = layout_of(x)
    assert layout.shape == (8, 3)
    assert layout.padded(1)
    assert not layout.padded(0)


def test_faults_are_told(mesh):
    with pytest.raises(ShardingError, match="lies on one device"):
        layout_of(jnp.zeros(8))
    with pytest.raises(ShardingError, match="given together, or neither"):
        layout_of(jnp.zeros(8), mesh)
    with pytest.raises(UnevenError, match="axis 0 has size 6, which 4 shards do not divide"):
        layout_of(jnp.zeros(6), mesh, ("y",))
    with pytest.raises(SpecError, match="no mesh axis is called 'z'"):
        layout_of(jnp.zeros(6), mesh, ("z",))
    with pytest.raises(TypeError, match=r"conv takes a jax.Array or an UnevenArray"):
        layout_of([1.0], verb="conv")
