"""The same operators on images whose channel axis is the last one.

torch keeps images as `(batch, channels, *space)`. XLA computes convolutions fastest with channels
last, and on CPUs it pays a transpose on each side of every convolution for the other order. The
engine keeps images in that order from one operator to the next, wherever it finds a variant here
(`engine/compiling/image_layout.py`). A variant takes what its operator takes, with channels last
in the arguments named `images`, and returns the results numbered `results` in that order too.

>>> sorted(VARIANTS["aten::convolution"].images), VARIANTS["aten::convolution"].results
(['input'], frozenset({0}))
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from isoshard.core.blocks.interpreting import recording

from . import batch_norm as batch_norm  # registers what is looked up below
from . import conv, registry


@dataclasses.dataclass(frozen=True)
class Variant:
    """An operator on channels-last images.

    Attributes:
        function: takes what the operator's lowering takes.
        images: names of the arguments with channels last.
        results: numbers of the results with channels last.
    """

    function: Callable[..., Any]
    images: frozenset[str]
    results: frozenset[int]


VARIANTS: dict[str, Variant] = {}


def _variant(name: str, images: tuple[str, ...], results: tuple[int, ...] = (0,)) -> Any:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        VARIANTS[f"aten::{name}"] = Variant(function, frozenset(images), frozenset(results))
        return function

    return register


_variant("convolution", images=("input",))(functools.partial(conv.biased, channels_last=True))
_variant("convolution_backward", images=("grad_output", "input"))(
    functools.partial(conv.gradients, channels_last=True)
)


def _flat(function: Callable[..., Any], images: int) -> Callable[..., Any]:
    """A function of (rows, channels) for images: batch and space are one axis to it.

    Images in blocks keep their axes, and channels become the second axis: one axis merged from
    several cannot be in blocks.

    Args:
        function: its first `images` arguments and its first result are images.
        images: how many.
    """

    @functools.wraps(function)
    def flattened(*args: Any, **kwargs: Any) -> Any:
        shape = args[0].shape
        if recording():
            moved = [jnp.moveaxis(x, -1, 1) for x in args[:images]]
            first, *rest = function(*moved, *args[images:], **kwargs)
            return (jnp.moveaxis(first, 1, -1), *rest)
        rows = [x.reshape(-1, shape[-1]) for x in args[:images]]
        first, *rest = function(*rows, *args[images:], **kwargs)
        return (first.reshape(shape), *rest)

    return flattened


# Statistics of each channel do not depend on the order of axes.
for _name in (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
):
    _variant(_name, images=("input",))(_flat(registry.named(f"aten::{_name}").function, 1))

for _name in ("native_batch_norm_backward", "batch_norm_backward"):
    function = registry.named(f"aten::{_name}").function
    _variant(_name, images=("grad_out", "input"))(_flat(function, 2))
