"""torch_xla's own operators, `torch.ops.xla.*`: what its documentation has scripts call.

>>> import torch, isoshard.torch_bridge as xs
>>> q = torch.ones(1, 2, 4, 8, device="jax")
>>> torch.ops.xla.flash_attention(q, q, q).shape
torch.Size([1, 2, 4, 8])

Importing this module defines them. They are operators of `torch.library`, so `torch.compile` keeps
them in its graphs, and others may be added to `XLA_LIB`, with a kernel for the dispatch key `XLA`.
As torch_xla's they have no gradients; the functions of the same names have.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals.undocumented import has_side_effect
from isoshard.torch_bridge.spmd import Mesh, mark_sharding

from . import flash, grouped_products, paged
from .quantized import quantized_matmul

XLA_LIB = torch.library.Library("xla", "DEF")  # for the life of the process
"""The library of the operators; scripts define their own in it."""


def _mark(
    t: torch.Tensor, device_ids: Sequence[int], mesh_shape: Any, axis_names: str, spec: str
) -> torch.Tensor:
    mesh = Mesh(list(device_ids), tuple(mesh_shape), ast.literal_eval(axis_names))
    marked = mark_sharding(t, mesh, ast.literal_eval(spec))
    return marked.view_as(marked)  # an operator may not return its argument


def _like_first(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(first)


def _unchanged(t: torch.Tensor, *args: Any) -> torch.Tensor:
    return t.clone()


def _of_sizes(*size_of: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A kernel for other devices that returns an empty tensor of the result's shape."""

    def meta(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return first.new_empty([size(first, second, *args) for size in size_of])

    return meta


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    product = torch.einsum("...n,mn->...m", x, weight)
    return product if bias is None else product + bias


def _rows(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    (
        "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, "
        "str partition_spec) -> Tensor",
        _mark,
        _unchanged,
    ),
    (
        "flash_attention(Tensor q, Tensor k, Tensor v, bool casual=False) -> Tensor",
        flash.flash_attention,
        _like_first,
    ),
    (
        "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor lengths, "
        "Tensor page_indices, int pages_per_compute_block, str? megacore_mode=None, "
        "float? attn_logits_soft_cap=None) -> Tensor",
        paged.paged_attention,
        _like_first,
    ),
    (
        "multi_queries_paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor lengths, "
        "Tensor page_indices, Tensor effective_q_lens, int num_kv_pages_per_compute_block, "
        "int num_queries_per_compute_block, bool use_kernel, "
        "float? attn_logits_soft_cap=None) -> Tensor",
        paged.multi_queries_paged_attention,
        _like_first,
    ),
    (
        "ragged_paged_attention(Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, "
        "Tensor cu_q_lens, Tensor num_seqs, *, float sm_scale=1, int? sliding_window=None, "
        "float? soft_cap=None, float? mask_value=None, float? k_scale=None, float? v_scale=None, "
        "bool use_kernel=True, int? num_kv_pages_per_block=None, int? num_queries_per_block=None, "
        "int? vmem_limit_bytes=None) -> Tensor",
        paged.ragged_paged_attention,
        _like_first,
    ),
    (
        "gmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int[]? tiling=None) -> Tensor",
        grouped_products.gmm,
        _of_sizes(lambda lhs, rhs, *_: lhs.shape[0], lambda lhs, rhs, *_: rhs.shape[2]),
    ),
    (
        "tgmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int[]? tiling=None) -> Tensor",
        grouped_products.tgmm,
        _of_sizes(
            lambda lhs, rhs, groups, *_: groups.shape[0],
            lambda lhs, rhs, *_: lhs.shape[0],
            lambda lhs, rhs, *_: rhs.shape[1],
        ),
    ),
    (
        "quantized_matmul_int8(Tensor x, Tensor w, Tensor scaler, Tensor? zero_point=None, "
        "Tensor? quant_block_size=None, bool quantize_activation=False) -> Tensor",
        grouped_products.quantized_matmul_int8,
        _rows,
    ),
    (
        "quantized_matmul(Tensor x, Tensor w, Tensor scale, Tensor? zero_point=None, "
        "int? block_size=-1, bool? int4_weight=False, bool? quantize_activation=False) -> Tensor",
        quantized_matmul,
        quantized_matmul,
    ),
    (
        "einsum_linear_forward(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
        _linear,
        _linear,
    ),
)

for _schema, _function, _meta in _OPERATORS:
    _name = _schema.partition("(")[0]
    XLA_LIB.define(_schema)
    XLA_LIB.impl(_name, _function, "XLA")
    XLA_LIB.impl(_name, _meta, "CompositeExplicitAutograd")

# Scripts mark a tensor and do not use the result; the mark must not be removed as dead code.
with optional():
    has_side_effect(torch.ops.xla.dynamo_mark_sharding.default)
