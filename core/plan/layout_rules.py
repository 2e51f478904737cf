"""Layout rules: in place of a spec in a plan, where the spec depends on the leaf.

A spec such as `P("model", None)` fits one order of axes. A rule computes the spec from the leaf's
name and rank: `Linear(out="model")` splits the output features of a torch `weight[out, in]` and of
a Flax `kernel[in, out]`.

>>> Linear(out="model").spec("head.weight", 2), Linear(out="model").spec("head.kernel", 2)
(P('model', None), P(None, 'model'))
"""

from __future__ import annotations

import abc
import dataclasses
import re
from typing import Literal

from jax.sharding import PartitionSpec as P

from ..errors import ShardingError

Axes = str | tuple[str, ...] | None
Order = Literal["out_in", "in_out"]


class PlanError(ShardingError, code="ISO006"):
    """A plan is malformed, or has no rule or a wrong spec for some leaves.

    Example:
        >>> Linear(out="x").spec("w", 3)
        Traceback (most recent call last):
            ...
        isoshard.core.plan.layout_rules.PlanError: w: Linear(out='x', into=None) is for a weight or kernel of rank 2 and a bias of rank 1, not 'w' of rank 3; give this leaf a rule with a P(..)
    """  # noqa: E501


class LayoutRule(abc.ABC):
    """A function from a leaf's name and rank to its spec."""

    @abc.abstractmethod
    def spec(self, name: str, ndim: int) -> P:
        """Give the spec of the leaf `name` of rank `ndim`, or raise PlanError."""


@dataclasses.dataclass(frozen=True)
class Linear(LayoutRule):
    """The sharding of a linear layer by features, for both orders of its weight.

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
        kind = kind_of(name)
        if kind == "bias" and ndim == 1:
            return P(self.out)
        if kind == "weight" and self._fits(ndim):
            return P(self.out, self.into)
        if kind == "kernel" and self._fits(ndim):
            return P(*(None,) * (ndim - 2), self.into, self.out)
        raise PlanError(
            f"{name}: {self} is for a weight or kernel of {self._ranks} and a bias of rank 1, "
            f"not {kind or name.rpartition('.')[2]!r} of rank {ndim}; give this leaf a rule with "
            "a P(..)"
        )

    _ranks = "rank 2"

    def _fits(self, ndim: int) -> bool:
        return ndim == 2


@dataclasses.dataclass(frozen=True)
class Conv(Linear):
    """The sharding of a convolution by channels, as `Linear` for `weight[out, in, ..]`.

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


@dataclasses.dataclass(frozen=True)
class Heads(Linear):
    """The sharding of an attention projection, whether heads are an axis of their own or not.

    As `Linear`; and in Flax's attention heads are a separate axis: `query.kernel[in, heads, dim]`
    and its `bias[heads, dim]`, `out.kernel[heads, dim, out]`. There the heads are split.

    Attributes:
        out: mesh axis or axes over the heads of a query, key or value.
        into: mesh axis or axes over the heads that an output projection takes.
        weights: the order of a `weight` of rank 2: "out_in" as `torch.nn.Linear` has it, "in_out"
            for the `Conv1D` of GPT-2 in transformers. A `kernel` is always in before out.

    Raises:
        PlanError: `weights` is something else.

    Example:
        >>> Heads(out="x").spec("query.kernel", 3), Heads(into="x").spec("out.kernel", 3)
        (P(None, 'x', None), P('x', None, None))
    """

    weights: Order = "out_in"

    _ranks = "rank 2 or 3"

    def __post_init__(self) -> None:
        """Check the order."""
        if self.weights not in ("out_in", "in_out"):
            raise PlanError(f"weights is 'out_in' or 'in_out', not {self.weights!r}")

    def spec(self, name: str, ndim: int) -> P:
        """Give the spec of the leaf `name` of rank `ndim`, or raise PlanError."""
        kind = kind_of(name)
        if kind == "kernel" and ndim == 3 and (self.out is None or self.into is None):
            return P(self.into, None, None) if self.out is None else P(None, self.out, None)
        if kind == "bias" and ndim == 2:
            return P(self.out, None)
        if kind == "weight" and ndim == 2 and self.weights == "in_out":
            return P(self.into, self.out)
        return super().spec(name, ndim)


@dataclasses.dataclass(frozen=True)
class Experts(LayoutRule):
    """Stacked experts of a mixture, `[expert, ..]`, split along the stack.

    Attributes:
        axis: mesh axis or axes.
        module: the name of the module that contains the experts.

    Example:
        >>> Experts("ep").spec("moe.experts.up", 3)
        P('ep',)
        >>> Experts("ep").spec("moe.experts.0.up.weight", 2)
        Traceback (most recent call last):
            ...
        isoshard.core.plan.layout_rules.PlanError: moe.experts.0.up.weight: expert parallelism splits stacked experts, [expert, ..], and here each is a module of its own; stack them, or give them another rule
    """  # noqa: E501

    axis: Axes
    module: str = "experts"

    def spec(self, name: str, ndim: int) -> P:
        """Give the spec of the leaf `name` of rank `ndim`, or raise PlanError."""
        alone = re.search(rf"(?:^|[.]){re.escape(self.module)}[.][0-9]+[.]", name)
        if alone or ndim == 0:
            raise PlanError(
                f"{name}: expert parallelism splits stacked experts, [expert, ..], and "
                f"{'here each is a module of its own' if alone else 'this is a number'}; stack "
                "them, or give them another rule"
            )
        return P(self.axis)


def kind_of(name: str) -> str | None:
    """The role of a leaf in its layer: "weight", "kernel", "bias", or None.

    Example:
        >>> kind_of("mlp.up.kernel"), kind_of("attn.in_proj_weight"), kind_of("tok.embedding")
        ('kernel', 'weight', None)
    """
    match = re.fullmatch(r"(?:.*[._])?(weight|kernel|bias)", name)
    return match and match[1]
