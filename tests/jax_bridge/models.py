"""What files of this folder share: a mesh of each kind, a model, and what is read of arrays."""

import jax
from flax import nnx
from jax.sharding import AxisType

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(*kinds):
    """The mesh (2, 4) with axes of these types."""
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)


class Model(nnx.Module):
    """Every kind of state: parameters, statistics of batches, random keys."""

    def __init__(self, rngs, width=8, hidden=32):
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
