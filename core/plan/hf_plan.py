"""Hugging Face tensor-parallel plans as rules of a `Plan`.

A model of `transformers` carries a plan: names of modules or parameters, in which `*` stands for
the number of a layer, each with a *style*. A style is the axis of the weights that is split, and
which collectives the module's forward then needs. Here only the first half matters: XLA's
partitioner derives the collectives from the layouts.

>>> rules_of({"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}, "model")
[('re:layers[.][0-9]+[.]mlp[.]up_proj(?:[.][^.]+)?', HfStyle('colwise', axis='model')), \
('re:layers[.][0-9]+[.]mlp[.]down_proj(?:[.][^.]+)?', HfStyle('rowwise', axis='model'))]
>>> HfStyle("colwise", "model").spec("layers.0.mlp.up_proj.weight", 2)
P('model', None)
>>> HfStyle("rowwise", "model").spec("layers.0.mlp.down_proj.weight", 2)
P(None, 'model')

Weights are in torch's order: `weight[out, in]`, and `[expert, out, in]` for stacked experts. The
packed styles split fused weights (gate and up in one tensor) into contiguous blocks, where
`transformers` splits each of the fused weights: the values are the same, and XLA inserts the
collectives.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from .layout_rules import Axes, LayoutRule, PlanError

_OUT, _INTO, _FIRST, _SECOND, _REPLICATED = "out", "into", "first", "second", "whole"

STYLES = {
    # The output features: the last axis but one; a bias is split as well.
    "colwise": _OUT,
    "colwise_rep": _OUT,
    "colwise_gather_output": _OUT,
    "packed_colwise": _OUT,
    "local_colwise": _OUT,
    "local_packed_colwise": _OUT,
    # The input features: the last axis; a bias is replicated.
    "rowwise": _INTO,
    "rowwise_rep": _INTO,
    "rowwise_split_input": _INTO,
    "packed_rowwise": _INTO,
    "local_rowwise": _INTO,
    "local_packed_rowwise": _INTO,
    # Embeddings by word or by feature; experts, one stack each.
    "embedding_rowwise": _FIRST,
    "embedding_colwise": _SECOND,
    "grouped_gemm": _FIRST,
    # Styles of activations or gradients only, which the partitioner derives by itself.
    "replicate": _REPLICATED,
    "replicated_with_grad_allreduce": _REPLICATED,
    "sequence_parallel": _REPLICATED,
    "all_reduce": _REPLICATED,
    "gather": _REPLICATED,
    "local": _REPLICATED,
    "local_params": _REPLICATED,
    "mla_kv_a_proj": _REPLICATED,
    "moe_tp_experts": _REPLICATED,
    "moe_identity_expert": _REPLICATED,
    "ep_dispatch_experts": _REPLICATED,
    "ep_router": _REPLICATED,
}
"""The styles of transformers 4.50 to 5.23, and the axis of a weight that each one splits."""


@dataclasses.dataclass(frozen=True, repr=False)
class HfStyle(LayoutRule):
    """The spec that a Hugging Face style gives to a parameter.

    Attributes:
        style: one of `STYLES`.
        axis: the mesh axis or axes to split over.

    Example:
        >>> HfStyle("grouped_gemm", "model").spec("experts.down_proj", 3)
        P('model', None, None)
    """

    style: str
    axis: Axes

    def __repr__(self) -> str:
        """The constructor's call."""
        return f"HfStyle({self.style!r}, axis={self.axis!r})"

    def spec(self, name: str, ndim: int) -> P:
        """Give the spec of the parameter `name` of rank `ndim`, or raise PlanError."""
        where = STYLES[self.style]
        is_vector_of_rows = where == _INTO and ndim == 1
        if where == _REPLICATED or is_vector_of_rows or ndim == 0:  # Gemma's factor of embeddings
            return P()
        split = {_OUT: max(ndim - 2, 0), _INTO: ndim - 1, _FIRST: 0, _SECOND: 1}[where]
        if not split < ndim:
            raise PlanError(
                f"{name}: the style {self.style!r} splits axis {split}, and this parameter has "
                f"rank {ndim}; give it another style, such as 'replicate'"
            )
        return P(*(self.axis if dim == split else None for dim in range(ndim)))


def rules_of(source: Any, axis: Axes, prefix: str = "") -> list[tuple[str, HfStyle]]:
    """Translate a tensor-parallel plan.

    Args:
        source: a mapping from names to styles, or an object that carries one as `tp_plan`,
            `_tp_plan` (a model) or `base_model_tp_plan` (a configuration).
        axis: the mesh axis or axes to split over.
        prefix: put before every name, such as "model." for the plan of a configuration.

    Returns:
        Patterns and rules. As in `transformers`, a name decides for the parameter of that name and
        for the parameters directly in the module of that name, the former first.

    Raises:
        PlanError: there is no plan, a style is unknown, or no name fits a parameter of the model.
    """
    plan = _plan_of(source)
    _check_styles(plan)
    ordered = sorted(plan, key=lambda name: (-name.count("."), name.count("*")))
    rules = [(_pattern(prefix + name), HfStyle(plan[name], axis)) for name in ordered]
    _check_names(source, [pattern for pattern, _ in rules], prefix)
    return rules


def _plan_of(source: Any) -> Mapping[str, str]:
    if isinstance(source, Mapping):
        return source
    for attribute in ("tp_plan", "_tp_plan", "base_model_tp_plan"):
        plan = getattr(source, attribute, None)
        if plan:
            return plan
    raise PlanError(
        f"{type(source).__name__} carries no tensor-parallel plan (tp_plan, _tp_plan and "
        "base_model_tp_plan are missing or empty); Plan.tensor_parallel(axis) splits a transformer "
        "by the names of its layers, and a dictionary of names and styles is taken here too"
    )


def _check_styles(plan: Mapping[str, str]) -> None:
    unknown = [f"  {name}: {style!r}" for name, style in plan.items() if style not in STYLES]
    if unknown:
        raise PlanError(
            "\n".join(
                [
                    "unknown tensor-parallel styles:",
                    *unknown,
                    f"the known ones are {', '.join(STYLES)}; replace them with "
                    "Plan.from_hf_tp_plan({**model.tp_plan, name: style})",
                ]
            )
        )


def _check_names(source: Any, patterns: list[str], prefix: str) -> None:
    if not patterns or not hasattr(source, "named_parameters"):
        return
    names = [name for name, _ in source.named_parameters()]
    if not any(re.fullmatch(pattern[3:], name) for pattern in patterns for name in names):
        raise PlanError(
            f"no name of the plan fits a parameter of {type(source).__name__}, so everything would "
            f"be replicated; its parameters are {', '.join(names[:5])}, .. and the prefix is "
            f"{prefix!r}"
        )


def _pattern(name: str) -> str:
    segments = ("[0-9]+" if segment == "*" else re.escape(segment) for segment in name.split("."))
    return f"re:{'[.]'.join(segments)}(?:[.][^.]+)?"
