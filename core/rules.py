"""Layout rules: what a plan may say instead of a spec, when the spec depends on the leaf.

A spec such as `P("model", None)` fits one order of axes. A rule knows the leaf's name and rank, and
gives the spec: `Linear(out="model")` splits the output features of a torch `weight[out, in]` and of
a Flax `kernel[in, out]` alike.

>>> Linear(out="model").spec("head.weight", 2), Linear(out="model").spec("head.kernel", 2)
(P('model', None), P(None, 'model'))
"""

from __future__ import annotations

import abc
import dataclasses
import re

from jax.sharding import PartitionSpec as P

from .errors import ShardingError

Axes = str | tuple[str, ...] | None


class PlanError(ShardingError):
    """A plan is malformed, or says nothing or nonsense about some leaves."""


class LayoutRule(abc.ABC):
    """Something that gives a leaf its spec."""

    @abc.abstractmethod
    def spec(self, name: str, ndim: int) -> P:
        """Give the spec of the leaf `name` of rank `ndim`, or raise PlanError."""


@dataclasses.dataclass(frozen=True)
class Linear(LayoutRule):
    """The layout of a linear layer in words, for both orders of its weight.

    Torch keeps a linear layer as `weight[out, in]`, Flax as `kernel[in, out]`. This rule gives
    `P(out, into)` to a leaf called `weight`, `P(into, out)` to one called `kernel` and `P(out)` to
    a `bias` (`in_proj_weight`, `in_proj_bias` and the like included). Any other leaf, or a weight
    that is not a matrix, is an error.

    Attributes:
        out: mesh axis or axes over the output features.
        into: mesh axis or axes over the input features.

    Example:
        >>> Linear(out="x").spec("mlp.kernel", 2)
        P(None, 'x')
    """

    out: Axes = None
    into: Axes = None

    def spec(self, name: str, ndim: int) -> P:
        """Give the spec of the leaf `name` of rank `ndim`, or raise PlanError."""
        kind = _kind(name)
        if kind == "bias" and ndim == 1:
            return P(self.out)
        if kind == "weight" and self._fits(ndim):
            return P(self.out, self.into)
        if kind == "kernel" and self._fits(ndim):
            return P(*(None,) * (ndim - 2), self.into, self.out)
        raise PlanError(
            f"{name}: {self} lays out a weight or kernel of {self._ranks} and a bias of rank 1, "
            f"not {kind or name.rpartition('.')[2]!r} of rank {ndim}; give this leaf a rule with "
            "a P(..)"
        )

    _ranks = "rank 2"

    def _fits(self, ndim: int) -> bool:
        return ndim == 2


@dataclasses.dataclass(frozen=True)
class Conv(Linear):
    """The layout of a convolution in words, as `Linear` for `weight[out, in, ..]`.

    Torch keeps the window last, Flax first: `kernel[.., in, out]`.

    Attributes:
        out: mesh axis or axes over the output channels.
        into: mesh axis or axes over the input channels.

    Example:
        >>> Conv(out="x").spec("conv1.kernel", 4)
        P(None, None, None, 'x')
    """

    _ranks = "rank 3 to 5"

    def _fits(self, ndim: int) -> bool:
        return 3 <= ndim <= 5


def _kind(name: str) -> str | None:
    found = re.fullmatch(r"(?:.*[._])?(weight|kernel|bias)", name)
    return found and found[1]
