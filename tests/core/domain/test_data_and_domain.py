"""A batch split over one mesh axis, space in uneven blocks over another: each moves by itself.

What a device sends is what it would for its own samples on a mesh of space alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

import isoshard as iso
from isoshard import P
from isoshard.core.layout.spec import same_layout

from .blocks import dense, in_blocks, out_of_blocks, with_loss
from .traffic import compiled, gathered, sent, summed

RNG = np.random.default_rng(0)
SIZES = (None, None, (5, 2, 7, 4), None)
SPEC = P("data", None, "x")
X = RNG.normal(size=(2, 4, 18, 6))
WEIGHTS = {
    "in": RNG.normal(size=(8, 4, 3, 3)) / 6,
    "down": RNG.normal(size=(8, 8, 3, 3)) / 9,
    "wide": RNG.normal(size=(8, 4, 3, 3)) / 6,
    "up": RNG.normal(size=(8, 4, 2, 2)) / 6,
    "out": RNG.normal(size=(4, 8, 3, 3)) / 9,
}


def conv(x, kernel, strides=(1, 1), dilation=(1, 1), groups=1):
    pads = tuple(zip(dilation, dilation, strict=True))
    kernel = kernel.astype(x.dtype)
    return lax.conv_general_dilated(
        x, kernel, strides, pads, rhs_dilation=dilation, feature_group_count=groups
    )


def norm(x):
    mean = x.mean((0, 2, 3), keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean((0, 2, 3), keepdims=True) + 1e-3)


def pool(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 1), "SAME")


def block(x, kernel):
    return jnp.tanh(conv(x, kernel, (2, 1)))


def unet(x, weights, **where):
    """Down, along and up again."""
    full = jax.nn.relu(norm(conv(x, weights["in"])))
    half = jax.checkpoint(block)(full, weights["down"])
    half = half + conv(jnp.roll(half, 2, 2), weights["wide"], dilation=(2, 1), groups=2)
    half = pool(half)
    up = iso.domain.conv_transpose(half, weights["up"].astype(x.dtype), stride=(2, 1), **where)
    up = iso.domain.interpolate(up, size=(18, 6), mode="linear", **where)
    return conv(jnp.concatenate([full[:, :4], up], 1), weights["out"])


def on(mesh, spec, samples):
    """A batch on a mesh, and its weights; float32."""
    x = X[:samples].astype(np.float32)
    return in_blocks(x, mesh, spec, SIZES), jax.tree.map(np.float32, WEIGHTS)


def trained(network):
    lifted = iso.domain.lift(with_loss(network))
    return jax.value_and_grad(lifted, (0, 1), has_aux=True)


def test_a_unet_sends_what_one_sample_does():
    both, alone = iso.make_mesh((2, 4), ("data", "x")), iso.make_mesh((4,), ("x",))
    step = trained(unet)
    given = on(both, SPEC, 2)
    (_, result), gradients = jax.jit(step)(*given)
    want, want_gradients = dense(
        lambda x, w: unet(x, w, mesh=iso.make_mesh((1,), ("x",)), spec=P()), X, WEIGHTS
    )
    layout = NamedSharding(both, SPEC)
    assert result.layout == gradients[0].layout == layout
    assert same_layout(result.array.sharding, layout, 4)
    assert same_layout(gradients[0].array.sharding, layout, 4)
    np.testing.assert_allclose(out_of_blocks(result), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out_of_blocks(gradients[0]), want_gradients[0], rtol=1e-3, atol=1e-3)
    for name, gradient in gradients[1].items():
        np.testing.assert_allclose(gradient, want_gradients[1][name], rtol=1e-3, atol=1e-3)
    text = compiled(step, *given)
    assert gathered(text) == 0
    assert summed(text) <= max(weight.size for weight in WEIGHTS.values())
    assert sent(text) == sent(compiled(step, *on(alone, P(None, None, "x"), 1)))
