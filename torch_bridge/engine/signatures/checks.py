"""What torch's kernels refuse, but its shape functions let pass.

The engine asks torch for the shapes of a result by running the operator on `meta` tensors, and
torch checks most arguments there. Some checks stand in the CPU and CUDA kernels only. They are
repeated here, so that the line at fault raises, with torch's words, and no number is made up.

>>> check(torch.ops.aten.var.correction, (torch.zeros(2, dtype=torch.int64, device="meta"),), {})
Traceback (most recent call last):
...
RuntimeError: std and var only support floating point and complex dtypes; var got torch.int64
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of

from . import axis_checks, dtype_checks, kernel_checks, layer_checks, order_checks, special_checks
from .index_checks import (
    elements_to_put,
    indexes_fit,
    list_of_places,
    put_fits,
    reads_something,
    real_fill,
    source_fits,
)
from .kernel_checks import first_tensor
from .shape_checks import (
    bins_for_each,
    bool_mask,
    fills_its_place,
    inside_memory,
    no_numbers,
    one_row_of_boundaries,
    rows_of_targets,
    some_bins,
    step_goes_on,
    written_once,
)

Arguments = dict[str, Any]


def check(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that torch's kernels refuse.

    Args:
        op: any aten overload.
        args: its arguments, with `meta` tensors.
        kwargs: likewise.

    Raises:
        RuntimeError: the dtypes or numbers do not go with the operator.
        NotImplementedError: the operator is not defined for complex numbers.
        IndexError: a reduction over nothing has no value.
    """
    rules = _rules(schema_of(op).name)
    if rules:
        arguments = schema_of(op).arguments
        given = zip((argument.name for argument in arguments), args, strict=False)
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        named = {**dict(given), **kwargs}
        named |= {key: value for key, value in defaults.items() if key not in named}
        named = {a.name: named[a.name] for a in arguments if a.name in named and not a.is_out}
        name = schema_of(op).name.removeprefix("aten::").strip("_")
        for rule in rules:
            rule(name, named)


def may_widen(
    op: OpOverload, target: torch.dtype, metas: tuple[Any, ...], args: tuple[Any, ...]
) -> bool:
    """Whether an in-place operation may compute a wider kind than what it writes to.

    Args:
        op: what is computed; shape functions of torch before 2.13 divide integers in place.
        target: the dtype it writes to.
        metas: the meta of each tensor argument.
        args: the arguments; one that is neither a number nor a tensor does not count.
    """
    kinds = [_kind(meta.dtype) for meta in metas]
    kinds += [_NUMBERS.get(type(arg).__name__, 0) for arg in args]
    divides = schema_of(op).name in ("aten::div", "aten::_foreach_div")
    return max([*kinds, 2 * divides]) > _kind(target)


def may_grow(targets: tuple[Any, ...], metas: tuple[Any, ...]) -> bool:
    """Whether an in-place operation has an operand of another shape than all it writes to.

    Args:
        targets: the meta of each tensor written to.
        metas: the meta of each tensor argument.
    """
    sizes = {target.size for target in targets}
    return any(meta.size and meta.size not in sizes for meta in metas) or len(sizes) > 1


def check_size(results: tuple[Any, ...], targets: tuple[Any, ...]) -> None:
    """Refuse an in-place operation whose result is larger than what it is written to.

    Args:
        results: the meta of what the operation computes.
        targets: the meta of each tensor written to.

    Raises:
        RuntimeError: operands broadcast to another shape.
    """
    for result, target in zip(results, targets, strict=False):
        if result is not None and result.size != target.size:
            raise RuntimeError(
                f"output with shape {list(target.size)} doesn't match the broadcast shape "
                f"{list(result.size)}"
            )


def check_cast(results: tuple[Any, ...], targets: tuple[Any, ...]) -> None:
    """Refuse an in-place operation whose result does not fit where it is written.

    Args:
        results: the meta of what the operation computes.
        targets: the meta of each tensor written to.

    Raises:
        RuntimeError: a float would be written into integers, say.
    """
    for result, target in zip(results, targets, strict=False):
        if result is not None and not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"result type {kernel_checks.spelled(result.dtype)} can't be cast to the desired "
                f"output type {kernel_checks.spelled(target.dtype)}"
            )


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


_NUMBERS = {"int": 1, "float": 2, "Lift": 2, "complex": 3}


def _rules(name: str) -> tuple[Callable[[str, Arguments], None], ...]:
    plain = name.removeprefix("aten::")
    found = _RULES.get(plain) or _RULES.get(plain.removesuffix("_"), ())
    return (
        *found,
        *special_checks.rules_of(plain),
        *layer_checks.rules_of(plain),
        *dtype_checks.rules_of(plain),
    )


def _floats_only(name: str, named: Arguments) -> None:
    dtype = first_tensor(named).dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        which = name if name.endswith("_mean") else "std and var"
        raise RuntimeError(
            f"{which} only support floating point and complex dtypes; {name} got {dtype}"
        )


def _not_complex(name: str, named: Arguments) -> None:
    tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
    if any(tensor.is_complex() for tensor in tensors):
        raise NotImplementedError(f"{name} is not supported for complex inputs")


def _no_complex_rows(name: str, named: Arguments) -> None:
    """A number alone need not be compared, nor what is empty, so torch takes both."""
    if first_tensor(named).dim() and first_tensor(named).numel():
        _not_complex(name, named)


def _ordered(name: str, named: Arguments) -> None:
    dtype = first_tensor(named).dtype
    if dtype.is_complex or dtype == torch.bool:
        kind = "complex" if dtype.is_complex else "bool"
        raise RuntimeError(f"{name}(): does not support {kind} input")


def _numbers_not_complex(name: str, named: Arguments) -> None:
    dtype = first_tensor(named).dtype
    if any(type(value) is complex for value in named.values()):
        raise NotImplementedError(f"{name} is not supported for complex types, got {dtype}")


def _number_fits(name: str, named: Arguments) -> None:
    dtypes = [value.dtype for value in named.values() if isinstance(value, torch.Tensor)]
    if named.get("dtype") is not None:
        dtypes.insert(0, named["dtype"])
    if not dtypes:
        return
    dtype, kinds = dtypes[0], {_kind(each) for each in dtypes}
    if 3 in kinds or dtype == torch.bool or _nowhere(name, named):
        return
    for argument in ("value", "fill_value", "fill", "alpha", "beta", "weight", "lambd"):
        number = named.get(argument)
        lost = type(number) is complex and number.imag
        if lost or (type(number) is int and _too_wide(number, dtype)):
            raise RuntimeError(
                f"{name}: {argument} {number} cannot be converted to type {dtype} without overflow"
            )


def _nowhere(name: str, named: Arguments) -> bool:
    """Whether a scatter has no places to write to: torch then does not look at the number."""
    index = named.get("index")
    return name == "scatter" and isinstance(index, torch.Tensor) and not index.numel()


def _too_wide(number: int, dtype: torch.dtype) -> bool:
    """Whether integers of up to 32 bits cannot hold a number; unsigned ones wrap negative ones."""
    if dtype.is_floating_point or dtype.itemsize > 4:
        return False
    bounds = torch.iinfo(dtype)
    return not (bounds.min or -bounds.max) <= number <= bounds.max


def _power_of_integers(name: str, named: Arguments) -> None:
    base, exponent = named["self"], named["exponent"]
    whole = isinstance(base, torch.Tensor) and _kind(base.dtype) < 2
    if whole and type(exponent) is int and exponent < 0:
        raise RuntimeError("Integers to negative integer powers are not allowed.")


def _source_like_self(name: str, named: Arguments) -> None:
    target = named["self"]
    for argument in ("source", "values"):
        source = named.get(argument)
        if isinstance(source, torch.Tensor) and source.dtype != target.dtype:
            mine, given = kernel_checks.spelled(target.dtype), kernel_checks.spelled(source.dtype)
            if argument == "values":
                raise RuntimeError(
                    "Index put requires the source and destination dtypes match, got "
                    f"{mine} for the destination and {given} for the source."
                )
            raise RuntimeError(
                f"{name}_(): self ({mine}) and source ({given}) must have the same scalar type; "
                "expected to have the same dtype"
            )


def _not_bool(name: str, named: Arguments) -> None:
    if first_tensor(named).dtype == torch.bool:
        raise RuntimeError(f"Boolean inputs not supported for {name}")


def _no_bool(name: str, named: Arguments) -> None:
    operands = [value for key, value in named.items() if key != "alpha"]
    bools = [
        value.dtype == torch.bool if isinstance(value, torch.Tensor) else type(value) is bool
        for value in operands
    ]
    if any(bools):
        raise RuntimeError(
            "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying "
            "to invert a mask, use the `~` or `logical_not()` operator instead."
        )


def _range(name: str, named: Arguments) -> None:
    low, high = named.get("low", named.get("from", 0)), named.get("high", named.get("to"))
    if high is not None and low >= high:
        raise RuntimeError(
            f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}"
        )


def _draws_floats(name: str, named: Arguments) -> None:
    dtype = first_tensor(named).dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(f'"{name}_" is not implemented for {dtype}')


_SHIFTS = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
_SHIFTS += ("__ilshift__", "__irshift__")
_PLACED = (axis_checks.axis_exists, list_of_places, _source_like_self, source_fits)
_RULES: dict[str, tuple[Callable[[str, Arguments], None], ...]] = {
    **dict.fromkeys(
        ("var", "std", "var_mean", "std_mean"), (_floats_only, axis_checks.distinct_axes)
    ),
    "nansum": (axis_checks.distinct_axes,),
    **dict.fromkeys(("floor", "ceil", "trunc"), (_not_complex,)),
    **dict.fromkeys(
        ("clamp", "clamp_min", "clamp_max"),
        (_not_complex, _numbers_not_complex, order_checks.bounds_numbers),
    ),
    **dict.fromkeys(("argmax", "argmin"), (_ordered, axis_checks.not_empty)),
    **dict.fromkeys(
        ("max", "min", "aminmax"), (axis_checks.not_empty, order_checks.orders_complex)
    ),
    "mode": (_no_complex_rows, axis_checks.not_empty),
    **dict.fromkeys(
        ("median", "nanmedian"), (axis_checks.not_empty_axis, order_checks.selects_numbers)
    ),
    "arange": (step_goes_on, kernel_checks.counted),
    **dict.fromkeys(
        ("amax", "amin"), (axis_checks.distinct_axes, axis_checks.not_empty, _not_complex)
    ),
    "topk": (axis_checks.axis_exists, order_checks.enough_to_select, order_checks.orders_rows),
    "kthvalue": (
        axis_checks.axis_exists,
        order_checks.enough_to_select,
        order_checks.selects_numbers,
    ),
    **dict.fromkeys(("argsort", "msort"), (order_checks.orders_rows,)),
    "searchsorted": (order_checks.sorts_into_buckets,),
    "mean": (order_checks.means_of_floats, axis_checks.distinct_axes),
    "logsumexp": (axis_checks.distinct_axes, order_checks.axes_to_sum),
    **dict.fromkeys(("sum", "all", "any", "count_nonzero"), (axis_checks.distinct_axes,)),
    **dict.fromkeys(_SHIFTS, (order_checks.shifts_bits,)),
    **dict.fromkeys(("floor_divide", "div"), (order_checks.divides_by_something,)),
    **dict.fromkeys(("remainder", "fmod"), (order_checks.divides_by_something,)),
    **dict.fromkeys(("cummax", "cummin"), (axis_checks.axis_of_number, _no_complex_rows)),
    **dict.fromkeys(("fill", "full", "full_like", "new_full"), (_number_fits,)),
    "masked_fill": (bool_mask, _number_fits),
    "index_fill": (
        axis_checks.axis_exists,
        list_of_places,
        _number_fits,
        real_fill,
        reads_something,
    ),
    "scatter": (_number_fits, reads_something),
    "masked_scatter": (bool_mask,),
    "as_strided_copy": (inside_memory,),
    "as_strided_scatter": (inside_memory, written_once),
    **dict.fromkeys(("select_scatter", "slice_scatter", "diagonal_scatter"), (fills_its_place,)),
    "multilabel_margin_loss_forward": (rows_of_targets,),
    "bucketize": (one_row_of_boundaries, order_checks.sorts_into_buckets),
    "histogram": (some_bins,),
    "_histogramdd_from_bin_tensors": (bins_for_each, some_bins),
    **dict.fromkeys(
        ("_histogramdd_from_bin_cts", "_histogramdd_bin_edges"), (bins_for_each, some_bins)
    ),
    "cat": (no_numbers,),
    **dict.fromkeys(("constant_pad_nd", "addcmul", "_unsafe_masked_index"), (_number_fits,)),
    "addcdiv": (kernel_checks.divides_by_floats, _number_fits),
    **dict.fromkeys(("lerp", "hardshrink"), (_number_fits,)),
    "pow": (_power_of_integers, kernel_checks.power_of_bools),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm"), (_number_fits,)),
    **dict.fromkeys(("sub", "rsub"), (_no_bool, kernel_checks.alpha_fits)),
    "add": (kernel_checks.alpha_fits,),
    "where": (kernel_checks.truth,),
    **dict.fromkeys(("complex", "polar"), (kernel_checks.two_halves,)),
    **dict.fromkeys(("upsample_linear1d", "upsample_trilinear3d"), (kernel_checks.pixels,)),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d"), (kernel_checks.pixels,)),
    **dict.fromkeys([f"upsample_nearest{n}d" for n in (1, 2, 3)], (kernel_checks.pixels,)),
    **dict.fromkeys([f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)], (kernel_checks.pixels,)),
    **dict.fromkeys(("sign", "signbit"), (_not_complex,)),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), (order_checks.larger_of_two,)),
    **dict.fromkeys(("atan2", "hypot", "copysign"), (order_checks.real_pairs,)),
    **dict.fromkeys(("nextafter", "xlogy"), (order_checks.real_pairs,)),
    "index_add": (*_PLACED, _number_fits),
    "index_reduce": (*_PLACED, reads_something),
    "index_copy": (axis_checks.axis_exists, list_of_places, _source_like_self),
    "put": (elements_to_put, _source_like_self),
    **dict.fromkeys(("index_put", "_index_put_impl"), (put_fits, _source_like_self)),
    "_unsafe_masked_index_put_accumulate": (_source_like_self,),
    "index": (indexes_fit,),
    **dict.fromkeys(("gather", "take"), (reads_something,)),
    "index_select": (axis_checks.axis_exists, list_of_places, reads_something),
    **dict.fromkeys(("scatter_add", "scatter_reduce"), (reads_something,)),
    **dict.fromkeys(("randint", "randint_like", "random"), (_range, kernel_checks.bounds_fit)),
    "randperm": (kernel_checks.numbers_fit,),
    **dict.fromkeys(("rand_like", "randn_like"), (kernel_checks.float_model,)),
    **dict.fromkeys(("lt", "le", "gt", "ge"), (kernel_checks.ordered_numbers,)),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), (kernel_checks.whole_numbers,)),
    **dict.fromkeys(("bitwise_not", "gcd", "lcm"), (kernel_checks.whole_numbers,)),
    **dict.fromkeys(("logaddexp", "logaddexp2"), (kernel_checks.some_floats,)),
    **dict.fromkeys(("linspace", "logspace"), (kernel_checks.real_ends, kernel_checks.counted)),
    **dict.fromkeys(("cumsum", "cumprod"), (kernel_checks.sums_numbers,)),
    "ldexp": (kernel_checks.whole_exponents,),
    "round": (kernel_checks.real_decimals,),
    "logit_": (kernel_checks.floats_held,),
    "ldexp_": (kernel_checks.floats_held, kernel_checks.whole_exponents),
    **dict.fromkeys(("igamma", "igammac"), (kernel_checks.some_floats,)),
    "_safe_softmax": (kernel_checks.softmax_of_floats,),
    "mvlgamma": (special_checks.order_of_gamma,),
    "normal": (kernel_checks.real_spread,),
    **dict.fromkeys(("normal_functional", "exponential", "cauchy"), (_draws_floats,)),
    **dict.fromkeys(("log_normal", "uniform"), (_draws_floats,)),
    "bernoulli": (kernel_checks.float_probabilities,),
    "multinomial": (kernel_checks.places_to_draw,),
    **dict.fromkeys(("norm", "linalg_vector_norm"), (axis_checks.distinct_axes,)),
    **dict.fromkeys(("_softmax", "_log_softmax"), (axis_checks.axis_exists,)),
    "sort": (axis_checks.axis_exists, order_checks.orders_rows),
    "relu": (_not_complex, _not_bool),
    "heaviside": (_not_complex, layer_checks.one_dtype),
}
