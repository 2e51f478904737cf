"""Products of float8 matrices with scales: of the matrix, of rows, or of blocks.

They are computed as products of float32, which XLA recognizes as float8 ones where scales are of
matrices or rows.

>>> x = jnp.ones((2, 256), jnp.float8_e4m3fn)
>>> blocks = jnp.array([[1.0, 0.5], [2.0, 0.0]])                # of 128 columns in each row
>>> scaled_mm(x, x.T, blocks, blocks.T).tolist()
[[160.0, 256.0], [256.0, 512.0]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .float8 import from_float8
from .grouped import grouped_mm, grouped_shape
from .registry import lower

_FACTORS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_TENSOR, _ROW = 0, 1
_BLOCKS = {2: (1, 16), 3: (1, 32), 4: (1, 128), 5: (128, 128)}
"""The rows and columns of a block, by torch's ScalingType."""
_MX = (2, 3)
"""Recipes whose scales of the second matrix are in the order of its transpose."""
_NAMES = (
    "TensorWise",
    "RowWise",
    "BlockWise1x16",
    "BlockWise1x32",
    "BlockWise1x128",
    "BlockWise128x128",
)

Shape = tuple[int, ...]


def _check_factors(operator: str, *factors: torch.Tensor) -> None:
    wrong = [str(t.dtype) for t in factors if t.dtype not in _FACTORS]
    if wrong:
        raise ValueError(
            f"{operator} multiplies matrices of {', '.join(map(str, _FACTORS))}, and got "
            f"{' and '.join(wrong)}; quantize first: (x / scale).to(torch.float8_e4m3fn)"
        )


def _check_matrices(
    operator: str, x: torch.Tensor, mat2: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if x.dim() != 2 or mat2.dim() != 2 or x.shape[1] != mat2.shape[0]:
        raise ValueError(
            f"{operator} multiplies matrices (m, k) and (k, n), and got {tuple(x.shape)} and "
            f"{tuple(mat2.shape)}"
        )
    _check_factors(operator, x, mat2)
    if bias is not None and tuple(bias.shape) != (mat2.shape[1],):
        raise ValueError(f"bias is of shape ({mat2.shape[1]},), and got {tuple(bias.shape)}")


def _grid(recipe: int, shape: Shape) -> Shape:
    """The shape of the scales of a matrix by a recipe."""
    if recipe == _TENSOR:
        return (1, 1)
    if recipe == _ROW:
        return (shape[0], 1)
    rows, columns = _BLOCKS[recipe]
    return (-(-shape[0] // rows), -(-shape[1] // columns))


def _recipe(scale: Shape, shape: Shape) -> int | None:
    """The recipe that scales of a matrix follow by their shape; None of no recipe."""
    if math.prod(scale) == 1:
        return _TENSOR
    return next((recipe for recipe in (_ROW, 4, 5) if scale == _grid(recipe, shape)), None)


def _product(
    x: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """The shape, where CPUs take the arguments; torch's meta kernel has the limits of CUDA's."""
    _check_matrices("_scaled_mm", x, mat2, bias)
    (rows, inner), columns = x.shape, mat2.shape[1]
    recipes = (
        _recipe(tuple(scale_a.shape), (rows, inner)),
        _recipe(tuple(scale_b.shape)[::-1], (columns, inner)),
    )
    fits = None not in recipes and (_TENSOR in recipes) == (recipes == (_TENSOR, _TENSOR))
    if {scale_a.dtype, scale_b.dtype} != {torch.float32} or not fits:
        blocks = -(-inner // 128)
        raise ValueError(
            f"_scaled_mm takes float32 scales, one for each matrix or ({rows}, 1) and "
            f"(1, {columns}) for rows and columns, or ({rows}, {blocks}) and ({blocks}, "
            f"{columns}) for blocks of 128; got scale_a {tuple(scale_a.shape)} of "
            f"{scale_a.dtype} and scale_b {tuple(scale_b.shape)} of {scale_b.dtype}. Others: "
            "torch.nn.functional.scaled_mm, or multiply dequantized matrices"
        )
    return x.new_empty(rows, columns, dtype=out_dtype or x.dtype)


@lower("aten::_scaled_mm", meta=_product)
def scaled_mm(
    x: jax.Array,
    mat2: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    bias: jax.Array | None = None,
    scale_result: jax.Array | None = None,
    out_dtype: np.dtype | None = None,
    use_fast_accum: bool = False,
) -> jax.Array:
    """`(scale_a x) @ (scale_b mat2) + bias` in float32.

    Scales are of the matrix, (m, 1) and (1, n) of rows and columns, or one for 128 of the inner
    dimension, in each row or for 128 of them.
    """
    first = _times(x, scale_a, _recipe(scale_a.shape, x.shape))
    second = _times(mat2.T, scale_b.T, _recipe(scale_b.shape[::-1], mat2.T.shape)).T
    return _summed(first, second, bias)


def _times(x: jax.Array, scale: jax.Array, recipe: int | None) -> jax.Array:
    """A matrix of float8 with its scales, in float32."""
    scale = from_float8(scale, jnp.float32)
    if recipe is None:
        raise ValueError(f"no scales of shape {scale.shape} for a matrix of shape {x.shape}")
    scale = scale.reshape(()) if recipe == _TENSOR else scale.reshape(_grid(recipe, x.shape))
    if recipe in _BLOCKS:
        for axis, count in enumerate(_BLOCKS[recipe]):
            scale = jnp.repeat(scale, count, axis)
        scale = scale[: x.shape[0], : x.shape[1]]
    return x.astype(jnp.float32) * scale


def _summed(first: jax.Array, second: jax.Array, bias: jax.Array | None) -> jax.Array:
    product = jnp.matmul(first, second, precision=jax.lax.Precision.HIGHEST)
    return product if bias is None else product + bias.astype(jnp.float32)


def _product_by_recipes(
    x: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    _check_matrices("scaled_mm", x, mat2, bias)
    if contraction_dim and [axis % 2 for axis in contraction_dim] != [1, 0]:
        raise ValueError(f"scaled_mm contracts axes 1 and 0, and got {list(contraction_dim)}")
    shapes = tuple(x.shape), tuple(mat2.shape)[::-1]
    for name, scales, recipes, swizzles, shape in (
        ("a", scale_a, recipe_a, swizzle_a, shapes[0]),
        ("b", scale_b, recipe_b, swizzle_b, shapes[1]),
    ):
        if len(scales) != 1 or len(recipes) != 1:
            raise NotImplementedError(
                f"scaled_mm with {len(scales)} scales of one matrix is for packed floats of 4 bits,"
                " which have no lowering; multiply dequantized matrices"
            )
        swizzled = any(swizzles)
        count = _swizzled_size(recipes[0], shape) if swizzled else None
        grid = _grid(recipes[0], shape)
        fits = scales[0].numel() == (count or grid[0] * grid[1])
        if swizzled and recipes[0] not in _MX:
            raise ValueError(f"scale_{name}: only scales of 1 x 16 and 1 x 32 can be swizzled")
        if not fits:
            raise ValueError(
                f"scale_{name} is of shape {tuple(scales[0].shape)}, and {_NAMES[recipes[0]]} has "
                f"{count or grid} for a matrix of {shape}"
            )
    return x.new_empty(x.shape[0], mat2.shape[1], dtype=out_dtype or torch.bfloat16)


def _swizzled_size(recipe: int, shape: Shape) -> int:
    rows, columns = _grid(recipe, shape)
    return -(-rows // 128) * 128 * -(-columns // 4) * 4


@lower("aten::_scaled_mm_v2", meta=_product_by_recipes)
def scaled_mm_by_recipes(
    x: jax.Array,
    mat2: jax.Array,
    scale_a: Sequence[jax.Array],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[jax.Array],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: jax.Array | None = None,
    out_dtype: np.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> jax.Array:
    """`torch.nn.functional.scaled_mm`: products with scales of a recipe, MX blocks among them."""
    [scale], [recipe] = scale_a, recipe_a
    first = _times(x, _plain(scale, recipe, swizzle_a, x.shape), recipe)
    [scale], [recipe] = scale_b, recipe_b
    shape = mat2.shape[::-1]
    in_order = recipe in _MX and scale.shape == _grid(recipe, shape)
    if scale.ndim == 2 and not any(swizzle_b) and not in_order:
        scale = scale.T
    second = _times(mat2.T, _plain(scale, recipe, swizzle_b, shape), recipe).T
    return _summed(first, second, bias)


def _plain(scale: jax.Array, recipe: int, swizzle: Sequence[int], shape: Shape) -> jax.Array:
    """Scales in rows and columns, from tiles of 32 x 4 x 4 where they are swizzled.

    Source: https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    if not any(swizzle):
        return scale
    rows, columns = _grid(recipe, shape)
    tiles = (-(-rows // 128), -(-columns // 4))
    scale = scale.reshape(*tiles, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return scale.reshape(tiles[0] * 128, tiles[1] * 4)[:rows, :columns]


def _grouped_product(
    x: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    _check_factors("_scaled_grouped_mm", x, mat2)
    if bias is not None or scale_result is not None:
        raise NotImplementedError(
            "_scaled_grouped_mm with a bias or scale_result has no lowering; apply it afterwards"
        )
    groups = 1 if offs is None or x.dim() + mat2.dim() != 4 else offs.shape[0]
    counts = (
        x.shape[:-1].numel() * groups,
        mat2.shape[-1] * (mat2.shape[0] if mat2.dim() == 3 else groups),
    )
    if (scale_a.numel(), scale_b.numel()) != counts:
        raise ValueError(
            f"_scaled_grouped_mm takes a scale for each row and column of each group, {counts[0]} "
            f"and {counts[1]}; got scale_a {tuple(scale_a.shape)} and scale_b "
            f"{tuple(scale_b.shape)}"
        )
    return grouped_shape(x, mat2, offs, None, out_dtype or torch.bfloat16)


@lower("aten::_scaled_grouped_mm", meta=_grouped_product)
def scaled_grouped_mm(
    x: jax.Array,
    mat2: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale_result: jax.Array | None = None,
    out_dtype: np.dtype | None = None,
    use_fast_accum: bool = False,
) -> jax.Array:
    """A product of float8 for each group of rows, with a scale for each row and column."""
    first, second = x.astype(jnp.float32), mat2.astype(jnp.float32)
    if x.ndim == mat2.ndim == 2 and offs is not None:  # groups of the inner dimension
        product = grouped_mm(first, second, offs)
        groups = offs.shape[0]
        return product * scale_a.reshape(groups, -1, 1) * scale_b.reshape(groups, 1, -1)
    first *= scale_a.reshape(*x.shape[:-1], 1)
    second *= scale_b.reshape(*mat2.shape[:-2], 1, mat2.shape[-1])
    return grouped_mm(first, second, offs)


def _grouped_by_recipes(
    x: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *_: Any,
) -> torch.Tensor:
    recipes = [*recipe_a, *recipe_b]
    if recipes != [_ROW, _ROW]:
        raise NotImplementedError(
            f"scaled_grouped_mm has a lowering for RowWise scales, not for "
            f"{', '.join(_NAMES[recipe] for recipe in recipes)}; multiply dequantized matrices"
        )
    return _grouped_product(x, mat2, scale_a[0], scale_b[0], offs, bias, None, out_dtype)


@lower("aten::_scaled_grouped_mm_v2", meta=_grouped_by_recipes)
def scaled_grouped_mm_by_recipes(
    x: jax.Array,
    mat2: jax.Array,
    scale_a: Sequence[jax.Array],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[jax.Array],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: np.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> jax.Array:
    """`torch.nn.functional.scaled_grouped_mm`, with scales of rows and columns."""
    return scaled_grouped_mm(x, mat2, scale_a[0], scale_b[0], offs)
