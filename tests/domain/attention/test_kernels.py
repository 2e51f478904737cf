"""Kernels of targets, interpreted: the same numbers as torch's, and no call that they lack."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from isoshard.core.nn.tiled_mask import tiled_mask
from isoshard.domain.attention.kernels import kernel_of
from isoshard.domain.attention.partitioned_attention import Attention

SIZE, WIDTH = 256, 64
TPU = Attention(False, 0.125, platform="tpu", interpret=True)
CAUSAL = Attention(True, 0.125, platform="tpu", interpret=True)
KEEP = jnp.arange(SIZE) >= jnp.array([[0], [30]])


def draw(heads, seed):
    return jax.random.normal(jax.random.key(seed), (2, heads, SIZE, WIDTH), jnp.bfloat16)


def padded(keep):
    rows, columns = jnp.arange(SIZE)[:, None], jnp.arange(SIZE)
    return (columns <= rows) & (columns > rows - 70) & keep[:, None, None, :]


def test_splash_attention_is_torchs():
    """Causal, and a window with keys that are padding, of which some queries see no other."""
    mask = tiled_mask(jax.make_jaxpr(padded)(KEEP), [KEEP])
    q, k, v, dout = draw(4, 1), draw(2, 2), draw(2, 3), draw(4, 4)
    hidden = torch.from_numpy(np.array(mask.dense()))
    for static, own, options in ((CAUSAL, None, {"is_causal": True}),
                                 (TPU, mask, {"attn_mask": hidden})):  # fmt: skip

        @jax.jit
        def run(q, k, v, dout, leaves, static=static, own=own):
            kernel = kernel_of(static, q, k, v, own)
            out, log = kernel.forward(q, k, v)
            return out, *kernel.backward(dout, q, k, v, log)

        got = run(q, k, v, dout, ())
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            leaves = [torch.from_numpy(np.asarray(x, np.float64)).to(dtype) for x in (q, k, v)]
            leaves = [x.requires_grad_() for x in leaves]
            out = scaled_dot_product_attention(*leaves, enable_gqa=True, **options)
            weight = torch.from_numpy(np.asarray(dout, np.float64)).to(dtype)
            results.append([out, *torch.autograd.grad(out, leaves, weight)])
        for result, exact, half in zip(got, *results, strict=True):
            exact = exact.detach()
            error = float((torch.from_numpy(np.asarray(result, np.float64)) - exact).abs().max())
            allowed = float((half.detach().double() - exact).abs().max())
            assert error <= 2 * allowed + 2**-8 * float(exact.abs().max())


def test_what_a_kernel_does_not_take_is_computed_in_tiles():
    q, k, v = draw(4, 1), draw(2, 2), draw(2, 3)
    assert kernel_of(CAUSAL, q, k, v, None) is not None
    dropping = Attention(True, 0.125, rate=0.1, platform="tpu")
    dense = jnp.ones((SIZE, SIZE), bool)
    assert kernel_of(dropping, q, k, v, None) is None
    assert kernel_of(CAUSAL, q, k, v, dense) is None
    assert kernel_of(CAUSAL, *(x.astype(jnp.float32) for x in (q, k, v)), None) is None
    assert kernel_of(CAUSAL, q[..., :200, :], k, v, None) is None
    for platform in ("cpu", "gpu"):  # JAX has no cuDNN in this process
        assert kernel_of(Attention(True, 1.0, platform=platform), q, k, v, None) is None
