"""Samples of the operator database: which ones are tried, and how they come to the `jax` device.

The database makes its samples from a few size constants (`S = 5`, `M = 10`, ..). An axis of 5 or 10
does not divide over eight devices, so the sharded column makes them from sizes that do.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

DEVICE = "jax"
_DATABASE = ("torch.testing._internal.opinfo", "torch.testing._internal.common_methods_invocations")
_USUAL_SIZES = {"XS": 3, "S": 5, "M": 10, "L": 20}
_EVEN_SIZES = {"XS": 4, "S": 8, "M": 16, "L": 24}
ON_CPU = frozenset({"tensor_split"})
"""Entries whose tensor arguments beside the input torch wants on the CPU, on every device."""

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


def choose(
    info: OpInfo,
    dtype: torch.dtype,
    limit: int,
    *,
    requires_grad: bool = False,
    reference: bool = False,
    takes: Callable[[SampleInput], bool] = lambda sample: True,
) -> list[SampleInput]:
    """At most `limit` samples of an entry, as unlike each other as possible.

    Args:
        info: an entry of the database.
        dtype: of the samples.
        limit: how many to return.
        requires_grad: their differentiable tensors ask for a gradient.
        reference: of the database's reference inputs.
        takes: which samples may be chosen.

    Returns:
        The first sample of each structure (shapes, types, keywords, extreme values), then others;
        evenly spread over the database's order if there are more than `limit`.
    """
    source = info.reference_inputs if reference else info.sample_inputs
    made = source("cpu", dtype, requires_grad=requires_grad)
    tried = filter(takes, itertools.islice(made, 1500 if reference else 200))
    found = list(itertools.islice(tried, 1 if limit == 1 else None))
    first: dict[Any, SampleInput] = {}
    for sample in found:
        first.setdefault(_structure(sample), sample)
    distinct = list(first.values())
    if len(distinct) > limit:
        return [distinct[i * len(distinct) // limit] for i in range(limit)]
    chosen = {id(sample) for sample in distinct}
    rest = [sample for sample in found if id(sample) not in chosen]
    return distinct + rest[: limit - len(distinct)]


def refused_by(info: OpInfo) -> list[SampleInput]:
    """The samples that the database knows to be refused, of tensors that the device may have.

    Those whose fault is in the values are called `VALUES`: the device must not refuse them.
    """
    made = []
    for error in info.error_inputs("cpu"):
        sample = error.sample_input
        sample.name = VALUES if _BY_VALUES.search(error.error_regex) else ""
        made.append(sample)
    return [
        sample
        for sample in made
        if all(
            leaf.layout == torch.strided and leaf.device.type == "cpu" and leaf.dim() <= _MOST_AXES
            for leaf in tensors(sample)
        )
    ]


VALUES = "a fault in the values"
_BY_VALUES = re.compile(
    r"is out of bounds for dimension|index out of range in self|invalid multinomial distribution"
    r"|probability tensor contains"
)
"""What torch says of indices and probabilities: a recorded operation does not wait for values, and
an index out of range gives NaN or is dropped (docs/pytorch.md)."""

_MOST_AXES = 64
"""Of NumPy's arrays, by which data comes from the host."""


def _structure(sample: SampleInput) -> Any:
    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return (leaf.dim(), leaf.dtype, 0 in leaf.shape, _is_extreme(leaf), _is_dense(leaf))
        return repr(leaf) if isinstance(leaf, bool | str | None) else type(leaf).__name__

    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    return str(spec), tuple(describe(leaf) for leaf in leaves)


def _is_extreme(tensor: torch.Tensor) -> tuple[bool, bool] | None:
    """Whether there are numbers that are not finite, and huge ones; None if it has no floats."""
    if tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    sizes = tensor.detach().abs()
    finite = sizes.isfinite()
    return not finite.all(), bool((sizes[finite] > 1e4).any())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy has the same strides: there are no gaps, and no element is there twice."""
    if tensor.layout != torch.strided:
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


@contextlib.contextmanager
def even_sizes() -> Iterator[None]:
    """Context in which the database makes samples whose axes divide over eight devices."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(_DATABASE) and module
    ]
    changed = [
        (module, name, usual)
        for module in modules
        for name, usual in _USUAL_SIZES.items()
        if vars(module).get(name) == usual
    ]
    try:
        for module, name, _ in changed:
            setattr(module, name, _EVEN_SIZES[name])
        yield
    finally:
        for module, name, usual in changed:
            setattr(module, name, usual)


def mapped(sample: SampleInput, leaf: Callable[[Any], Any]) -> SampleInput:
    """The sample with `leaf` applied to every leaf of its arguments, each tensor once."""
    known: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return leaf(value)
        if id(value) not in known:
            known[id(value)] = leaf(value)
        return known[id(value)]

    return SampleInput(
        pytree.tree_map(once, sample.input),
        args=pytree.tree_map(once, tuple(sample.args)),
        kwargs=pytree.tree_map(once, dict(sample.kwargs)),
        output_process_fn_grad=sample.output_process_fn_grad,
        broadcasts_input=sample.broadcasts_input,
        name=sample.name,
    )


def moved(
    sample: SampleInput, place: Callable[[torch.Tensor], torch.Tensor], *, arguments: bool = True
) -> SampleInput:
    """The sample on the `jax` device.

    Args:
        sample: on the CPU.
        place: brings a tensor to the device.
        arguments: bring the arguments beside the input, too.

    Returns:
        The sample with its tensors moved and its device arguments renamed.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _as_it_lies(value, place)
        if isinstance(value, torch.device):
            return torch.device(DEVICE)
        return DEVICE if isinstance(value, str) and value == "cpu" else value

    new = mapped(sample, leaf)
    if not arguments:
        new.args = tuple(sample.args)
    return new


def names_device(sample: SampleInput) -> bool:
    """Whether a sample says where results are made: by a tensor, or by a device argument."""
    return any(
        isinstance(leaf, torch.Tensor | torch.device) or leaf == DEVICE
        for leaf in pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(leaf, torch.Tensor | torch.device | str)
    )


def copied(sample: SampleInput) -> SampleInput:
    """The sample with tensors of its own, so that writes to one do not reach the other."""
    return mapped(sample, lambda value: _like(value, None))


def widened(sample: SampleInput) -> SampleInput:
    """The sample in the next wider floating-point type."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return _WIDER.get(value, value)
        return _like(value, _WIDER)

    return mapped(sample, leaf)


def _like(value: Any, dtypes: dict[torch.dtype, torch.dtype] | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _as_it_lies(
        value, lambda leaf: leaf.clone().to((dtypes or {}).get(value.dtype, value.dtype))
    )


def _as_it_lies(
    tensor: torch.Tensor, place: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A tensor that `place` makes anew; of one that has gaps, the memory with the gaps."""
    if _is_dense(tensor):
        new = place(tensor.detach())
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * step for size, step in steps)
        memory = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
        new = place(memory).as_strided(tensor.shape, tensor.stride()).detach()
    return new.requires_grad_(tensor.requires_grad)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts; those of a sample, in order."""
    if isinstance(value, SampleInput):
        value = (value.input, value.args, value.kwargs)
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
