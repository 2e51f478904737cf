"""What torch's kernels refuse of dtypes and bounds of comparisons, bits, and random draws.

Its shape functions let this pass. The rules of indices stand in `index_checks`, those of shapes in
`shape_checks`.

>>> whole_numbers("gcd", {"self": torch.zeros(2, device="meta")})
Traceback (most recent call last):
...
NotImplementedError: "gcd" not implemented for 'Float'
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

Arguments = dict[str, Any]

_SPELLED = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def spelled(dtype: torch.dtype) -> str:
    """The name of a dtype in the errors of torch's kernels.

    >>> spelled(torch.int64)
    'Long'
    """
    return _SPELLED.get(dtype, str(dtype))


def is_whole(dtype: torch.dtype) -> bool:
    """Whether a dtype holds integers or bools only."""
    return not (dtype.is_floating_point or dtype.is_complex)


def tensors_of(named: Arguments) -> list[torch.Tensor]:
    """The arguments that are tensors; those in lists do not count."""
    return [value for value in named.values() if isinstance(value, torch.Tensor)]


def first_tensor(named: Arguments) -> torch.Tensor:
    """The first argument that is a tensor."""
    return tensors_of(named)[0]


def asked(named: Arguments) -> torch.dtype | None:
    """The dtype that a call asks for; the default of a schema is a number, and asks for none."""
    given = named.get("dtype")
    return given if isinstance(given, torch.dtype) else None


def _refuse(name: str, dtype: torch.dtype) -> None:
    raise NotImplementedError(f"\"{name}\" not implemented for '{spelled(dtype)}'")


def ordered_numbers(name: str, named: Arguments) -> None:
    """Refuse to compare complex numbers by size."""
    for operand in (named["self"], named["other"]):
        if isinstance(operand, torch.Tensor):
            if operand.is_complex():
                _refuse(name, operand.dtype)
        elif type(operand) is complex:
            _refuse(name, torch.complex64)


def whole_numbers(name: str, named: Arguments) -> None:
    """Refuse operators on bits, and divisors, of numbers that are not whole."""
    for operand in (named.get("self"), named.get("other")):
        if isinstance(operand, torch.Tensor):
            if operand.dtype.is_floating_point or operand.is_complex():
                _refuse(name, operand.dtype)
        elif type(operand) in (float, complex):
            _refuse(name, torch.get_default_dtype())


def some_floats(name: str, named: Arguments) -> None:
    """Refuse whole numbers only, where the result is none."""
    dtype = torch.result_type(named["self"], named["other"])
    if is_whole(dtype):
        _refuse(name, dtype)


def float_model(name: str, named: Arguments) -> None:
    """Refuse to draw uniform and normal numbers as integers."""
    dtype = asked(named) or named["self"].dtype
    if is_whole(dtype):
        _refuse(name, dtype)


def float_probabilities(name: str, named: Arguments) -> None:
    """Refuse probabilities that are no floats, or do not fit what is drawn into."""
    given = named.get("p", named["self"])
    if not isinstance(given, torch.Tensor):
        return
    if not given.dtype.is_floating_point:
        _refuse(name, given.dtype)
    if given is not named["self"]:
        given.expand(named["self"].shape)


def real_spread(name: str, named: Arguments) -> None:
    """Refuse normal numbers around whole ones, and of a spread that is whole or complex."""
    spread, tensors = named["std"], tensors_of(named)
    if isinstance(spread, torch.Tensor) and spread.is_complex():
        raise RuntimeError(f"{name} expects standard deviation to be non-complex")
    if tensors and tensors[0].numel() and is_whole(tensors[0].dtype):
        _refuse(name, tensors[0].dtype)


def places_to_draw(name: str, named: Arguments) -> None:
    """Refuse to draw from what is no list of probabilities, or to draw nothing."""
    weights, count = named["self"], named["num_samples"]
    if weights.dim() not in (1, 2):
        raise RuntimeError(f"prob_dist must be 1 or 2 dim, but has {weights.dim()}")
    if not weights.dtype.is_floating_point:
        raise RuntimeError(
            "multinomial only supports floating-point dtypes for input, got: "
            f"{spelled(weights.dtype)}"
        )
    if count <= 0:
        raise RuntimeError(f"cannot sample n_sample <= 0 samples: {count}")
    if not named.get("replacement", False) and count > weights.shape[-1]:
        raise RuntimeError(
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement: "
            f"{count} of {weights.shape[-1]}"
        )
    if weights.shape[-1] > 2**24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def bounds_fit(name: str, named: Arguments) -> None:
    """Refuse whole random numbers, and bounds, that their dtype cannot hold; warn of gaps."""
    model = named.get("self")
    dtype = asked(named) or (model.dtype if isinstance(model, torch.Tensor) else torch.int64)
    low = named.get("low", named.get("from", 0))
    high = named.get("high", named.get("to"))
    if dtype.is_complex:
        raise RuntimeError(f"{name} handles only real numbers, got {spelled(dtype)}")
    if high is None and "from" not in named:
        return
    last = low if high is None else high - 1
    if dtype.is_floating_point:
        exact, most = round(2 / torch.finfo(dtype).eps), torch.finfo(dtype).max
        for argument, number in (("from", low), ("to - 1", last)):
            if not -most <= number <= most:
                raise RuntimeError(f"{argument} is out of bounds for {spelled(dtype)}: {number}")
            if not -exact <= number <= exact:
                warnings.warn(
                    f"{argument} is out of bounds [-{exact}, {exact}]: {spelled(dtype)} does not "
                    "hold every whole number beyond",
                    stacklevel=2,
                )
        return
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, _most(dtype))
    for argument, number in (("from", low), ("to - 1", last)):
        if not least <= number <= most:
            raise RuntimeError(f"{argument} is out of bounds for {spelled(dtype)}: {number}")


def _most(dtype: torch.dtype) -> int:
    return torch.iinfo(dtype).max


def numbers_fit(name: str, named: Arguments) -> None:
    """Refuse a permutation of more numbers than its dtype can tell apart."""
    dtype, count = asked(named) or torch.int64, named["n"]
    if dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps) + 1
        if count > most:
            raise RuntimeError(f"n cannot be greater than {most} for {spelled(dtype)} type.")
    elif dtype != torch.bool and count - 1 > _most(dtype):
        raise RuntimeError(f"n {count} cannot be converted to type {dtype} without overflow")


def power_of_bools(name: str, named: Arguments) -> None:
    """Refuse bools to the power of a tensor of bools."""
    base, exponent = named["self"], named["exponent"]
    if isinstance(exponent, torch.Tensor) and torch.result_type(base, exponent) == torch.bool:
        _refuse(name, torch.bool)


def counted(name: str, named: Arguments) -> None:
    """Refuse evenly spaced numbers of a dtype that has only two."""
    if asked(named) == torch.bool:
        _refuse(name, torch.bool)


def sums_numbers(name: str, named: Arguments) -> None:
    """Refuse running sums and products that are bools."""
    tensor = named["self"]
    if asked(named) == torch.bool and tensor.dim() and tensor.numel():
        _refuse(name, torch.bool)


def real_ends(name: str, named: Arguments) -> None:
    """Refuse evenly spaced real numbers between complex ones."""
    dtype = asked(named)
    if dtype is None or dtype.is_complex:
        return
    for end in (named["start"], named["end"]):
        if type(end) is complex or (isinstance(end, torch.Tensor) and end.is_complex()):
            raise RuntimeError(
                f"torch.{name}(): complex numbers can't be safely cast to dtype {dtype}; ask for a "
                "complex one"
            )


def whole_exponents(name: str, named: Arguments) -> None:
    """Refuse to scale floats by powers that are bools."""
    if named["self"].dtype.is_floating_point and named["other"].dtype == torch.bool:
        _refuse(name, torch.bool)


def real_decimals(name: str, named: Arguments) -> None:
    """Refuse to round whole numbers to places behind, or before, the point."""
    if "decimals" in named and is_whole(named["self"].dtype):
        _refuse(name, named["self"].dtype)


def floats_held(name: str, named: Arguments) -> None:
    """Refuse to write what is a float to whole numbers."""
    if is_whole(named["self"].dtype):
        raise RuntimeError(
            f"{name}: result type Float can't be cast to the desired output type "
            f"{spelled(named['self'].dtype)}"
        )


def softmax_of_floats(name: str, named: Arguments) -> None:
    """Refuse a softmax of other numbers than real ones; of no integers it is nothing."""
    dtype = asked(named) or named["self"].dtype
    if named["self"].is_complex() or (named["self"].numel() and not dtype.is_floating_point):
        _refuse(name, dtype)


def divides_by_floats(name: str, named: Arguments) -> None:
    """Refuse a quotient of whole numbers as a term."""
    first, second = named["tensor1"].dtype, named["tensor2"].dtype
    if is_whole(first) and is_whole(second):
        raise RuntimeError(
            f"Integer division with {name} is no longer supported: got {spelled(first)} and "
            f"{spelled(second)}; give floats"
        )


def alpha_fits(name: str, named: Arguments) -> None:
    """Refuse a factor of another kind than what it multiplies."""
    alpha, operands = named.get("alpha", 1), (named["self"], named["other"])
    if type(alpha) is int or not all(isinstance(each, torch.Tensor | int) for each in operands):
        return
    dtype = torch.result_type(*operands)
    if type(alpha) is bool and dtype != torch.bool:
        raise RuntimeError("Boolean alpha only supported for Boolean results.")
    if type(alpha) is float and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(
            "For integral input tensors, argument alpha must not be a floating point number."
        )
    if type(alpha) is complex and not dtype.is_complex:
        raise RuntimeError(
            "For non-complex input tensors, argument alpha must not be a complex number."
        )


def two_halves(name: str, named: Arguments) -> None:
    """Refuse parts of a complex number that are no floats of one dtype."""
    first, second = (tensor.dtype for tensor in tensors_of(named))
    if not (first.is_floating_point and second.is_floating_point):
        raise RuntimeError(
            "Expected both inputs to be Half, Float or Double tensors but got "
            f"{spelled(first)} and {spelled(second)}"
        )
    if first != second:
        raise RuntimeError(
            f"Expected object of scalar type {spelled(first)} but got scalar type "
            f"{spelled(second)} for second argument"
        )


def pixels(name: str, named: Arguments) -> None:
    """Refuse to resize images of whole numbers beyond bytes, and to images of no pixels."""
    size = named.get("output_size") or ()
    if any(extent <= 0 for extent in size):
        raise RuntimeError(
            f"{name}: Input and output sizes should be greater than 0, but got output size "
            f"{list(size)}"
        )
    tensor = first_tensor(named)
    if not tensor.dtype.is_floating_point and tensor.dtype != torch.uint8:
        _refuse(name, tensor.dtype)


def truth(name: str, named: Arguments) -> None:
    """Refuse a condition that is neither bools nor bytes."""
    dtype = named["condition"].dtype
    if dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(
            "where expected condition to be a boolean tensor, but got a tensor with dtype "
            f"{spelled(dtype)}"
        )
