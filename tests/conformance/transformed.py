"""Columns that put an operator in another light: forward mode, `vmap`, views, channels last.

Each is a function `(info, sample) -> result`, as those of `columns`, and does on the CPU and on the
`jax` device the same.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.autograd import forward_ad
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from .samples import mapped, tensors

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class NothingToCompare(Exception):
    """This sample has no such result in torch itself."""


def called(info: OpInfo, sample: SampleInput) -> Any:
    """The operator's results."""
    return info.op(sample.input, *sample.args, **sample.kwargs)


def noise(number: int, like: torch.Tensor) -> torch.Tensor:
    """Fixed random numbers of a tensor's shape, dtype and device."""
    source = torch.Generator().manual_seed(number)
    narrow = torch.complex64 if like.is_complex() else torch.float32
    made = torch.randn(like.shape, generator=source, dtype=narrow)
    return made.to(like.dtype).to(like.device)


def forward_mode(info: OpInfo, sample: SampleInput) -> Any:
    """The tangents of the results, for fixed random tangents of the inputs."""
    count = iter(range(len(tensors(sample))))

    def dual(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        return forward_ad.make_dual(leaf, noise(next(count), leaf))

    with forward_ad.dual_level():
        given = mapped(sample, dual)
        out = info.gradcheck_wrapper(info.op, given.input, *given.args, **given.kwargs)
        out = tensors(sample.output_process_fn_grad(out))
        found = [forward_ad.unpack_dual(leaf).tangent for leaf in out]
    if all(tangent is None for tangent in found):
        raise NothingToCompare("no tangent")
    return [
        torch.zeros_like(leaf) if tangent is None else tangent.detach().clone()
        for leaf, tangent in zip(out, found, strict=True)
    ]


def batched(info: OpInfo, sample: SampleInput) -> Any:
    """The operator under `vmap`: over every tensor twice, forwards and flipped."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not places:
        raise NothingToCompare("no tensor")

    def one(*given: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, leaf in zip(places, given, strict=True):
            filled[place] = leaf
        source, args, kwargs = pytree.tree_unflatten(filled, spec)
        return info.op(source, *args, **kwargs)

    both = [torch.stack([leaves[place], leaves[place]]) for place in places]
    # Under vmap our tensors look to torch's wrapper of random entries as if of its lazy backend,
    # which it then steps.
    with mock.patch.object(torch, "_lazy", create=True):
        return torch.func.vmap(one)(*both)


def through_views(sample: SampleInput) -> tuple[list[torch.Tensor], SampleInput]:
    """New leaves of twice the size, and the sample with views of them as its tensors."""
    leaves = []

    def view(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        leaves.append(torch.stack([leaf.detach(), leaf.detach()], -1).requires_grad_())
        return leaves[-1].select(-1, 1)

    return leaves, mapped(sample, view)


def has_channels(sample: SampleInput) -> bool:
    """Whether a tensor has the axes that a channels-last format asks for."""
    return any(leaf.dim() in _FORMATS for leaf in tensors(sample))


def channels_last(info: OpInfo, sample: SampleInput) -> Any:
    """The results of inputs in channels-last formats, and their strides where those count.

    Those of volumes depend on which kernel torch's CPU chooses for a shape, and group norms keep
    the format on CPUs only.
    """

    def formatted(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() not in _FORMATS:
            return leaf
        return leaf.contiguous(memory_format=_FORMATS[leaf.dim()])

    out = called(info, mapped(sample, formatted))
    strides = [
        [step for step, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1]
        for leaf in tensors(out)
        if leaf.layout == torch.strided
        and leaf.numel()
        and not info.name.endswith(("3d", "GroupNorm"))
    ]
    return out, strides
