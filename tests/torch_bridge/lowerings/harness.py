"""Compare one lowering with CPU torch, without the engine."""

from __future__ import annotations

import jax
import numpy as np
import torch

from isoshard.torch_bridge import lowerings  # noqa: F401  (fills the table)
from isoshard.torch_bridge.dtypes import physical_dtype
from isoshard.torch_bridge.engine.signatures.bound_op import build_call
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.metas import Meta, Slot, map_leaves


def to_array(tensor: torch.Tensor) -> jax.Array:
    """Copy a CPU tensor to JAX in its physical dtype."""
    if tensor.dtype == torch.bfloat16:
        return jax.numpy.asarray(tensor.float().numpy()).astype("bfloat16")
    return jax.numpy.asarray(tensor.numpy().astype(physical_dtype(tensor.dtype)))


def evaluate(op: torch._ops.OpOverload, *args, key=None, **kwargs) -> list:
    """Run the lowering of `op` on CPU tensors' values; arrays come back as a list."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # as the engine does
        return _evaluate(op, args, kwargs, key)


def _evaluate(op, args, kwargs, key) -> list:
    tensors: list[torch.Tensor] = []

    def slot(leaf):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return Slot(len(tensors) - 1)
        return leaf

    args = tuple(map_leaves(slot, arg) for arg in args)
    kwargs = {name: map_leaves(slot, value) for name, value in kwargs.items()}
    metas = tuple(Meta.of(t) for t in tensors)
    call = build_call(op, args, kwargs, metas, outs=infer(op, args, kwargs, metas))
    inputs = [to_array(t) for t in tensors]
    return jax.jit(lambda inputs: call(inputs, [], key))(inputs)


def check(op: torch._ops.OpOverload, *args, rtol=2e-5, atol=2e-5, **kwargs) -> None:
    """Assert that the lowering of `op` equals CPU torch (same shapes and values)."""
    want = op(*map_leaves(_clone, args), **kwargs)
    want = list(want) if isinstance(want, tuple | list) else [want]
    got = evaluate(op, *args, **kwargs)
    for g, w in zip(got, want, strict=True):
        if w is None:
            assert g is None
            continue
        assert tuple(g.shape) == tuple(w.shape)
        assert g.dtype == physical_dtype(w.dtype)
        np.testing.assert_allclose(
            np.asarray(g.astype("float32") if g.dtype == "bfloat16" else g),
            (w.float() if w.dtype == torch.bfloat16 else w).detach().numpy(),
            rtol=rtol,
            atol=atol,
        )


def _clone(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
