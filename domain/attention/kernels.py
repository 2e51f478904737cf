"""Attention by the kernels of a target: Pallas splash attention on TPUs, cuDNN's on GPUs.

`kernel_of` says whether the kernel of a platform computes an attention; where it returns None, the
attention is computed in tiles (`blockwise`), which takes everything and is linear in memory too.

| | TPU, splash | GPU, cuDNN |
|---|---|---|
| dtype | bfloat16 | bfloat16, float16 |
| order | any, or a window of any two sides | any, causal, causal with a window |
| documents, keys that are padding | yes | no |
| dropout, added masks, other masks | no | no |
| lengths | multiples of 128 | any |
| width of a head | up to 128, or a multiple | up to 128, a multiple of 8 |

Both kernels have a gradient of their own, which takes the result of the forward kernel. torch's
gradient is an operation of its own, so it calls the forward kernel again with the same arguments,
and XLA computes it once.

Sources: `jax.experimental.pallas.ops.tpu.splash_attention`; `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.kit import MaskTerms, TiledMask, compilation, mask_terms

if TYPE_CHECKING:
    from .partitioned_attention import Attention

LANES = 128
"""Of a TPU's vector unit: what a block of splash attention is a multiple of."""

_BLOCK = 512
_HIDDEN = np.int32(-(2**31))
"""The document of a key that is padding."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel and what it is called with.

    Attributes:
        attend: of `segments`, (batch, heads, queries, width), keys and values; the result.
        attend_with_logarithms: the same, and the logarithms of the sums of exponentials, float32.
        segments: int32 arrays [batch, queries] and [batch, keys]: documents; None for one.
        hides: whether a query may see no key; kernels then return a mean of values.
    """

    attend: Callable[..., jax.Array]
    attend_with_logarithms: Callable[..., tuple[jax.Array, jax.Array]]
    segments: tuple[jax.Array, jax.Array] | None
    hides: bool

    def forward(self, q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        """The result, 0 for a query that sees no key, and the logarithms."""
        with jax.enable_x64(False):  # Mosaic has no 64-bit indices
            out, log = self.attend_with_logarithms(self.segments, q, k, v)
        if not self.hides:
            return out, log
        return jnp.where(_seen(log), out, 0), jnp.where(_seen(log)[..., 0], log, -jnp.inf)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, log: Any) -> tuple[jax.Array, ...]:
        """The gradients of queries, keys and values."""
        dout = (jnp.where(_seen(log), dout, 0) if self.hides else dout).astype(q.dtype)
        with jax.enable_x64(False):
            _, back = jax.vjp(functools.partial(self.attend, self.segments), q, k, v)
            return back(dout)


def kernel_of(static: Attention, q: Any, k: Any, v: Any, mask: Any) -> Kernel | None:
    """The kernel that computes an attention on its target; None if that has none for it."""
    if static.rate or q.ndim != 4 or q.shape[-1] != v.shape[-1]:
        return None
    if mask is not None and not isinstance(mask, TiledMask):
        return None
    terms = MaskTerms() if mask is None else mask_terms(mask)
    if terms is None:
        return None
    if static.causal:
        terms = terms.within(None, 0)
    if static.platform == "tpu":
        return _splash(static, q, k, terms)
    if static.platform in ("gpu", "cuda"):
        return _cudnn(static, q, k, terms)
    return None


def _splash(static: Attention, q: Any, k: Any, terms: MaskTerms) -> Kernel | None:
    lengths, width = (q.shape[-2], k.shape[-2]), q.shape[-1]
    if any(length % LANES for length in lengths) or (width > LANES and width % LANES):
        return None
    if q.dtype != jnp.bfloat16:
        return None
    segments: Any = None
    batch = q.shape[0]
    if terms.same is not None or terms.keys is not None:
        rows, columns = terms.same or (jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
        if terms.keys is not None:
            columns = jnp.where(terms.keys, columns, _HIDDEN)
        pairs = zip((rows, columns), lengths, strict=True)
        segments = tuple(jnp.broadcast_to(x, (batch, n)).astype(jnp.int32) for x, n in pairs)
    run = functools.partial(
        _run_splash, q.shape[1], lengths, (terms.before, terms.after), static.scale
    )
    interpret = static.interpret
    return Kernel(
        functools.partial(run, interpret, False),
        functools.partial(run, interpret, True),
        segments,
        segments is not None or _may_hide(terms, *lengths),
    )


def _run_splash(
    heads: int,
    lengths: tuple[int, int],
    window: tuple[int | None, int | None],
    scale: float,
    interpret: bool,
    logarithms: bool,
    segments: Any,
    q: Any,
    k: Any,
    v: Any,
) -> Any:
    mask: Any = compilation.SPLASH_FULL.resolve()(lengths)
    if window != (None, None):
        mask = compilation.SPLASH_WINDOW.resolve()(lengths, window, 0)
    rows, columns = (_block(length) for length in lengths)
    kernel = compilation.SPLASH_KERNEL.resolve()(
        compilation.SPLASH_HEADS.resolve()([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=logarithms,
        interpret=interpret,
        block_sizes=compilation.SPLASH_BLOCKS.resolve()(
            block_q=rows,
            block_kv=columns,
            block_kv_compute=columns,
            block_q_dkv=rows,
            block_kv_dkv=columns,
            block_kv_dkv_compute=columns,
            block_q_dq=rows,
            block_kv_dq=columns,
        ),
    )
    q = (q * scale).astype(q.dtype)
    if segments is None:
        out = jax.vmap(kernel)(q, k, v)
    else:
        out = jax.vmap(kernel)(q, k, v, compilation.SPLASH_SEGMENTS.resolve()(*segments))
    return (out[0], out[1][0]) if logarithms else out


def _block(length: int) -> int:
    """The largest block of whole lanes that divides a length."""
    return next(size for size in range(_BLOCK, 0, -LANES) if length % size == 0)


def _cudnn(static: Attention, q: Any, k: Any, terms: MaskTerms) -> Kernel | None:
    width, after = q.shape[-1], terms.after
    if q.dtype not in (jnp.bfloat16, jnp.float16) or width % 8 or width > 128:
        return None
    if terms.same is not None or terms.keys is not None or not _has_cudnn():
        return None
    if (terms.before, after) != (None, None) and after != 0:
        return None
    if _may_hide(terms, q.shape[-2], k.shape[-2]):
        return None

    def run(logarithms: bool, segments: None, q: Any, k: Any, v: Any) -> Any:
        out: Any = jax.nn.dot_product_attention(
            *(x.swapaxes(1, 2) for x in (q, k, v)),
            scale=static.scale,
            is_causal=after == 0,
            local_window_size=None if terms.before is None else (terms.before, 0),
            implementation="cudnn",
            return_residual=logarithms,
        )
        return jax.tree.map(lambda x: x.swapaxes(1, 2), out)

    return Kernel(functools.partial(run, False), functools.partial(run, True), None, False)


def _may_hide(terms: MaskTerms, queries: int, keys: int) -> bool:
    """Whether a window leaves a query without a key."""
    behind = terms.before is not None and (terms.before < 0 or queries > keys + terms.before)
    return behind or (terms.after is not None and terms.after < 0)


def _has_cudnn() -> bool:
    """Whether this process has cuDNN, which JAX requires of it where it traces."""
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    run = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(run, x, x, x)
    except RuntimeError:
        return False
    return True


def _seen(log: jax.Array) -> jax.Array:
    """Whether a query sees a key, by its logarithm; that of hidden scores is below any other."""
    return (log > -1e30)[..., None]
