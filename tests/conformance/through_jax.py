"""Gradients by JAX: `jax.vjp` of `iso.jax_function(operator)` in a jitted program.

On CPU torch the same is `torch.autograd.grad`. Where torch has gradients of gradients, they are
compared as well. JAX's cotangents of complex numbers are the conjugates of torch's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import isoshard as iso

from .samples import DEVICE, mapped, tensors
from .transformed import NothingToCompare, noise


def vjp(info: OpInfo, sample: SampleInput) -> list[torch.Tensor]:
    """The results, their gradients for fixed cotangents, and the gradients of those gradients.

    The latter are with respect to the inputs and to the cotangents.
    """
    inputs = list({id(leaf): leaf for leaf in tensors(sample) if leaf.requires_grad}.values())
    if not inputs:
        raise NothingToCompare("no differentiable input")
    run = _by_jax if inputs[0].device.type == DEVICE else _by_torch
    return run(info, sample, inputs)


def _is_twice(info: OpInfo) -> bool:
    return info.supports_gradgrad and info.full_name not in _ONCE


_ONCE = frozenset(
    {
        *("nn.functional.ctc_loss", "module.nn.CTCLoss"),
        *("module.nn.MultiLabelMarginLoss", "module.nn.MultiMarginLoss"),
        *("module.nn.Transformer", "module.nn.TransformerEncoder", "module.nn.TransformerDecoder"),
        *("module.nn.TransformerEncoderLayer", "module.nn.TransformerDecoderLayer"),
        *("index_reduce.prod", "scatter_reduce.prod"),
    }
)
"""Of these gradients of gradients are not tried: CPU torch has none, which the database does not
say, and those of products look at values (how many factors are zero)."""


def _results(info: OpInfo, sample: SampleInput) -> list[torch.Tensor]:
    out = info.gradcheck_wrapper(info.op, sample.input, *sample.args, **sample.kwargs)
    found = [leaf for leaf in tensors(sample.output_process_fn_grad(out)) if leaf.requires_grad]
    if not found:
        raise NothingToCompare("no differentiable result")
    return found


def _by_torch(
    info: OpInfo, sample: SampleInput, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    results, twice = _results(info, sample), _is_twice(info)
    cotangents = [one.requires_grad_(twice) for one in _noise(results)]
    found = _gradients(results, inputs, cotangents, twice)
    if twice:
        found += _gradients(found, [*inputs, *cotangents], _noise(found))
    return [leaf.detach() for leaf in (*results, *found)]


def _gradients(
    results: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    create_graph: bool = False,
) -> list[torch.Tensor]:
    pairs = [pair for pair in zip(results, cotangents, strict=True) if pair[0].requires_grad]
    if not pairs:
        return list(map(torch.zeros_like, inputs))
    results, cotangents = zip(*pairs, strict=True)
    options: Any = {"create_graph": create_graph, "allow_unused": True}
    found = torch.autograd.grad(results, inputs, cotangents, **options)
    pairs = zip(inputs, found, strict=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in pairs]


def _by_jax(
    info: OpInfo, sample: SampleInput, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    def operator(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        places = {id(leaf): one for leaf, one in zip(inputs, given, strict=True)}
        return _results(info, mapped(sample, lambda leaf: places.get(id(leaf), leaf)))

    def function(arrays: list[Any]) -> list[Any]:
        return iso.jax_function(operator)(arrays, rng=jax.random.key(0))

    def gradients(arrays: list[Any], cotangents: list[Any]) -> list[Any]:
        return _pulled(function, arrays)[1](cotangents)[0]

    def program(arrays: list[Any]) -> list[Any]:
        results, pull = _pulled(function, arrays)
        cotangents = _noise(results)
        [found] = pull(cotangents)
        if not _is_twice(info):
            return [*results, *found]
        _, pull = _pulled(gradients, arrays, cotangents)
        return [*results, *found, *jax.tree.leaves(pull(_noise(found)))]

    with jax.enable_x64(True):
        arrays = [iso.to_jax(leaf.detach()) for leaf in inputs]
        return list(map(iso.to_torch, jax.jit(program)(arrays)))


def _pulled(function: Callable[..., Any], *given: Any) -> tuple[Any, Callable[[Any], Any]]:
    """As `jax.vjp`, with cotangents as torch has them."""
    results, pull = jax.vjp(function, *given)
    return results, lambda slopes: jax.tree.map(jnp.conj, pull(jax.tree.map(jnp.conj, slopes)))


def _noise(results: Sequence[Any]) -> list[Any]:
    """Fixed random numbers of the shapes and dtypes of tensors, or of arrays."""
    if all(isinstance(one, torch.Tensor) for one in results):
        return [noise(number, one) for number, one in enumerate(results)]
    like = [torch.empty(one.shape, dtype=getattr(torch, one.dtype.name)) for one in results]
    with jax.ensure_compile_time_eval():
        return [iso.to_jax(one) for one in _noise(like)]
