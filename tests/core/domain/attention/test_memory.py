"""Short sequences: a ring takes less memory than the scores that it does without."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.domain.attention.masking import spans
from isoshard.core.domain.attention.ring_attention import ring_attention
from isoshard.core.layout.mesh import make_mesh

HEADS, WIDTH = 4, 32


def temporaries(devices, length, attend):
    """Bytes per device that the result and the gradients of an attention take meanwhile."""
    mesh = make_mesh((devices,), ("s",), axis_types=(AxisType.Auto,))
    laid = NamedSharding(mesh, P(None, "s"))
    like = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32, sharding=laid)

    def both(q, k, v):
        out, back = jax.vjp(lambda q, k, v: attend(mesh, q, k, v), q, k, v)
        return tuple(jax.lax.with_sharding_constraint(x, laid) for x in (out, *back(out)))

    return jax.jit(both).lower(*[like] * 3).compile().memory_analysis().temp_size_in_bytes


def ring(mesh, q, k, v):
    return ring_attention(q, k, v, mesh=mesh, axis="s")


def dense(mesh, q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@pytest.mark.parametrize(("devices", "length"), [(2, 512), (8, 512), (4, 1024)])
def test_it_is_below_that_of_dense_attention(devices, length):
    took = temporaries(devices, length, ring)
    assert took < temporaries(devices, length, dense) / 2
    assert took < 2 * 4 * HEADS * (length // devices) * length  # twice its share of the scores


@pytest.mark.parametrize("length", [1, 7, 63, 64, 100, 127, 300, 513, 2048, 5000])
@pytest.mark.parametrize("most", [16, 512])
def test_tiles_cover_a_block_and_are_no_larger_than_asked(length, most):
    number, size = spans(length, most)
    assert size <= min(length, most)
    assert (number - 1) * size < length <= number * size


def test_long_blocks_have_the_tiles_that_were_asked_for():
    assert spans(4096, 512) == (8, 512)
