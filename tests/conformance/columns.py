"""The columns of the table: what is done with one sample, on CPU torch and on the `jax` device.

Each column is a function `(info, sample) -> result` that runs unchanged on samples of either
device, so both sides do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from . import through_jax, transformed
from .samples import tensors
from .transformed import NothingToCompare
from .transformed import called as forward


@dataclasses.dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: for the table and the command line.
        dtype: of the samples.
        run: computes what is compared.
        applies: whether an entry has such a cell.
        samples: how many samples are tried at most, unless the command line says otherwise.
        gradient: the samples ask for gradients.
        sharded: the samples are laid out over the mesh.
        refused: the samples are those that torch refuses, and what is compared are the errors.
        reference: the samples are the many by which torch tests against NumPy: of extreme values,
            broadcast, not contiguous.
        takes: whether a sample is one for the column.
        several: the result is a list of results, and of words.
    """

    name: str
    dtype: torch.dtype
    run: Callable[[OpInfo, SampleInput], Any]
    applies: Callable[[OpInfo], bool] = lambda info: True
    samples: int = 12
    gradient: bool = False
    sharded: bool = False
    refused: bool = False
    reference: bool = False
    takes: Callable[[SampleInput], bool] = lambda sample: True
    several: bool = False


def backward(info: OpInfo, sample: SampleInput) -> Any:
    """The results, and the gradient of every input that asks for one, for fixed cotangents."""
    return _gradients(info, sample, [leaf for leaf in tensors(sample) if leaf.requires_grad])


def view_backward(info: OpInfo, sample: SampleInput) -> Any:
    """The gradients of the tensors that the inputs are views of."""
    leaves, viewed = transformed.through_views(sample)
    return _gradients(info, viewed, leaves)


def _gradients(info: OpInfo, sample: SampleInput, inputs: list[torch.Tensor]) -> Any:
    out = info.gradcheck_wrapper(info.op, sample.input, *sample.args, **sample.kwargs)
    out = sample.output_process_fn_grad(out)
    results = [leaf for leaf in tensors(out) if leaf.requires_grad]
    if not results or not inputs:
        raise NothingToCompare("no differentiable result")
    cotangents = [transformed.noise(number, leaf) for number, leaf in enumerate(results)]
    gradients = torch.autograd.grad(results, inputs, cotangents, allow_unused=True)
    found = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(inputs, gradients, strict=True)
    ]
    return [*(leaf.detach() for leaf in results), *found]


def in_place(info: OpInfo, sample: SampleInput) -> Any:
    """The input after the in-place variant; the call must return that very tensor."""
    if sample.broadcasts_input or not isinstance(sample.input, torch.Tensor | list | tuple):
        raise NothingToCompare("the in-place variant does not take this sample")
    target = pytree.tree_map(_clone, sample.input)
    returned = info.inplace_variant(target, *sample.args, **sample.kwargs)
    if isinstance(target, torch.Tensor) and returned is not target:
        raise AssertionError("the in-place variant did not return its input")
    return target


def into(info: OpInfo, sample: SampleInput) -> list[Any]:
    """What `out=` holds afterwards, and what is said, for tensors of other shapes and types.

    Of the right shape, empty (they grow), of another shape (they grow with a warning), and of
    int64, which holds integers and bools (an error for others).
    """
    wanted = forward(info, sample)
    with _every_warning() as said:
        found = [_into(info, sample, wanted, lambda leaf: (leaf.shape, leaf.dtype))]
        found.append(_into(info, sample, wanted, lambda leaf: ((0,), leaf.dtype)))
        said.clear()
        larger = _into(info, sample, wanted, lambda leaf: (_larger(leaf), leaf.dtype))
        warned = any("resized" in str(warning.message) for warning in said)
        numbers = any(leaf.dim() == 0 for leaf in tensors(wanted))  # some kernels do not warn then
        found += [larger, None if numbers else warned]
    kernels_ask = not info.name.startswith(("fft.", "nan", "_chunk_cat"))  # each in its own way
    if kernels_ask and all(leaf.dtype != torch.int64 for leaf in tensors(wanted)):
        try:
            found.append(_into(info, sample, wanted, lambda leaf: (leaf.shape, torch.int64)))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def _larger(leaf: torch.Tensor) -> tuple[int, ...]:
    return (*leaf.shape, 2) if leaf.numel() else (3,)


@contextlib.contextmanager
def _every_warning() -> Iterator[list[warnings.WarningMessage]]:
    """Context that gives the warnings said in it, also those that torch says once only."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        torch.set_warn_always(before)


def _into(info: OpInfo, sample: SampleInput, wanted: Any, form: Callable[..., Any]) -> Any:
    def room(leaf: Any) -> Any:
        shape, dtype = form(leaf)
        return torch.empty(shape, dtype=dtype, device=leaf.device)

    out = pytree.tree_map_only(torch.Tensor, room, wanted)
    if isinstance(out, tuple | list):
        out = type(wanted)(out) if type(wanted) in (tuple, list) else tuple(out)
    # The device is that of `out`; torch's argument parser does not know that ours is called jax.
    kwargs = {name: value for name, value in sample.kwargs.items() if name != "device"}
    with torch._C.DisableTorchFunction():
        returned = info.op(sample.input, *sample.args, **kwargs, out=out)
    results, several = tensors(returned), isinstance(out, tuple | list)
    if several and not results:  # the kernels of `unbind_copy` and its like return nothing
        return out
    if any(result is not own for result, own in zip(results, tensors(out), strict=True)):
        raise AssertionError("the call did not return its out= argument")
    return out


def errors(info: OpInfo, sample: SampleInput) -> list[str]:
    """The classes of the error that a call raises, from the nearest on."""
    try:
        forward(info, sample)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return ["nothing"]


def gradcheck(info: OpInfo, sample: SampleInput) -> list[bool]:
    """Whether the gradients, and those of gradients, are those of finite differences."""
    inputs = [leaf for leaf in tensors(sample) if leaf.requires_grad]
    if not inputs:
        raise NothingToCompare("no differentiable input")

    def function(*_: torch.Tensor) -> Any:
        out = info.gradcheck_wrapper(info.op, sample.input, *sample.args, **sample.kwargs)
        out = [leaf for leaf in tensors(sample.output_process_fn_grad(out)) if leaf.requires_grad]
        if not out:
            raise NothingToCompare("no differentiable result")
        return tuple(out)

    options = {"fast_mode": True, "check_batched_grad": False, "nondet_tol": 1e-10}
    found = [torch.autograd.gradcheck(function, inputs, check_forward_ad=False, **options)]
    if info.supports_gradgrad:
        found.append(torch.autograd.gradgradcheck(function, inputs, **options))
    return found


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _differentiable(info: OpInfo, dtype: torch.dtype = torch.float32) -> bool:
    return info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")


COLUMNS = {
    column.name: column
    for column in (
        Column("forward", torch.float32, forward),
        Column("backward", torch.float32, backward, _differentiable, gradient=True),
        Column(
            "sharded",
            torch.float32,
            forward,
            # Muon's products are in bfloat16, and are rounded anew by each order of their sums.
            lambda info: info.name != "optim.Muon",
            sharded=True,
        ),
        Column(
            "in-place",
            torch.float32,
            in_place,
            lambda info: info.inplace_variant is not None,
            samples=4,
        ),
        Column(
            "out=",
            torch.float32,
            into,
            # Where it uses the running statistics, torch leaves the other results as they came.
            lambda info: info.supports_out and info.name != "native_batch_norm",
            samples=4,
            several=True,
        ),
        Column(
            "bfloat16",
            torch.bfloat16,
            forward,
            # LBFGS decides by differences that bfloat16 does not hold.
            lambda info: info.name != "optim.LBFGS",
            samples=4,
        ),
        Column("float64", torch.float64, forward, samples=4),
        Column("complex128", torch.complex128, forward, samples=4),
        Column("int64", torch.int64, forward, samples=4),
        Column("bool", torch.bool, forward, samples=4),
        Column(
            "gradcheck",
            torch.float64,
            gradcheck,
            lambda info: _differentiable(info) and not info.name.startswith("module."),
            samples=1,
            gradient=True,
        ),
        Column(
            "errors",
            torch.float32,
            errors,
            lambda info: info.error_inputs_func is not None,
            samples=64,
            refused=True,
        ),
        Column(
            "reference",
            torch.float32,
            forward,
            lambda info: info.reference_inputs_func is not None,
            samples=16,
            reference=True,
            takes=lambda sample: bool(tensors(sample)),
        ),
        Column(
            "channels last",
            torch.float32,
            transformed.channels_last,
            samples=3,
            takes=transformed.has_channels,
        ),
        Column(
            "forward mode",
            torch.float32,
            transformed.forward_mode,
            lambda info: info.supports_forward_ad,
            samples=2,
            gradient=True,
        ),
        Column("vmap", torch.float32, transformed.batched, samples=2),
        Column("views", torch.float32, view_backward, _differentiable, samples=2, gradient=True),
        *(
            Column(
                name,
                dtype,
                through_jax.vjp,
                # To torch what JAX traces is compiled, and it packs this call for dynamo.
                lambda info, dtype=dtype: (
                    _differentiable(info, dtype) and info.name != "invoke_quant"
                ),
                samples=6,
                gradient=True,
            )
            for name, dtype in (
                ("jax.vjp", torch.float64),
                ("complex jax.vjp", torch.complex128),
            )
        ),
    )
}


def columns_of(info: OpInfo, names: Any = tuple(COLUMNS)) -> list[str]:
    """The columns that an entry has, of those named."""
    return [
        name for name in names if COLUMNS[name].dtype in info.dtypes and COLUMNS[name].applies(info)
    ]
