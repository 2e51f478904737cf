"""Own kernels of operators that go through NumPy or the CPU, called by a compiled program.

While JAX traces there is nothing for such a kernel to read. It becomes a `jax.pure_callback`, with
the shapes of the operator's fake kernel:

>>> import jax, numpy, torch
>>> import isoshard as iso
>>> @torch.library.custom_op("doc::cubed_by_numpy", mutates_args=())
... def cubed(x: torch.Tensor) -> torch.Tensor:
...     return torch.tensor(x.cpu().numpy() ** 3, device=x.device)
>>> _ = cubed.register_fake(torch.empty_like)
>>> jax.jit(iso.jax_function(cubed))(numpy.array([2.0, 3.0], "float32"))
Array([ 8., 27.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from isoshard.torch_bridge._torch_internals import OpOverload, pytree
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.common.exchange import from_numpy, to_numpy
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot, map_leaves


def find(op: OpOverload) -> Callable[..., Any]:
    """A function that computes `op` by its CPU kernel when the program runs."""

    def run(
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        metas: tuple[Meta, ...],
        inputs: Sequence[jax.Array],
        scalars: Sequence[jax.Array],
        key: jax.Array | None,
    ) -> Any:
        outs = infer(op, args, kwargs, metas, [1.0] * len(scalars))
        types = [
            jax.ShapeDtypeStruct(out.size, physical_dtype(out.dtype))
            for out in outs
            if out is not None
        ]

        def kernel(arrays: Sequence[Any], scalars: Sequence[Any]) -> list[np.ndarray]:
            def real(leaf: Any) -> Any:
                if isinstance(leaf, Slot):
                    return from_numpy(np.array(arrays[leaf.index]), metas[leaf.index].dtype)
                return float(scalars[leaf.index]) if isinstance(leaf, Lift) else leaf

            with torch.no_grad():
                outputs = op(
                    *(map_leaves(real, arg) for arg in args),
                    **{name: map_leaves(real, value) for name, value in kwargs.items()},
                )
            leaves = [
                leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)
            ]
            pairs = zip(leaves, types, strict=True)
            return [np.asarray(to_numpy(leaf), kind.dtype) for leaf, kind in pairs]

        operands = list(inputs), list(scalars)
        results = iter(jax.pure_callback(kernel, types, *operands, vmap_method="sequential"))
        return tuple(None if out is None else next(results) for out in outs)

    return run
