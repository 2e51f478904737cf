"""Plans of other libraries: Hugging Face's styles, the axis rules of Flax, T5X, MaxText."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .hf_plan import rules_of
from .layout_rules import Axes

if TYPE_CHECKING:
    from typing import Self


class Imports:
    """The constructors of `Plan` that translate other libraries' rules; `Plan` inherits them."""

    if TYPE_CHECKING:

        def __init__(self, rules: Any = (), **more: Any) -> None:
            """See `Plan`."""

    @classmethod
    def from_hf_tp_plan(
        cls, source: Any, axis: Axes = "model", *, prefix: str = "", default: Any = None
    ) -> Self:
        """Translate the tensor-parallel plan of a Hugging Face model.

        Args:
            source: a mapping from names to styles, or what carries one as `tp_plan`, `_tp_plan`
                (a model of `transformers`) or `base_model_tp_plan` (its configuration).
            axis: the mesh axis or axes to split over.
            prefix: put before every name: the plan of a configuration names the parameters of the
                base model, which are called "model.." in a model with a head.
            default: the spec of what the plan does not name. None, as in `transformers`,
                replicates it.

        Returns:
            A plan for torch's order of weights. Data parallelism needs no rule: shard the batch
            over another mesh axis.

        Raises:
            PlanError: there is no plan, a style is unknown, or no name fits a parameter of the
                model.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> styles = {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}
            >>> plan = Plan.from_hf_tp_plan(styles, axis="model")
            >>> mesh = make_mesh((2, 4), ("data", "model"))
            >>> shapes = {"layers.0.q_proj.weight": (8, 4), "layers.0.o_proj.weight": (4, 8)}
            >>> plan.resolve(shapes, mesh).specs
            {'layers.0.q_proj.weight': P('model',), 'layers.0.o_proj.weight': P(None, 'model')}
        """
        return cls(rules_of(source, axis, prefix), default=default)

    @classmethod
    def from_logical_axis_rules(
        cls, rules: Sequence[tuple[str, Axes]], *, default: Any = None, **more: Any
    ) -> Self:
        """Translate the axis rules of a Flax, T5X or MaxText model.

        The plan shards leaves by the axis names in their metadata: boxes of
        `nn.with_logical_partitioning` or `nn.with_partitioning`, variables of NNX with
        `out_sharding` or `sharding_names`.

        Args:
            rules: pairs of logical axis and mesh axis, a tuple of mesh axes, or None; the order and
                repeated names mean what they mean to Flax's `logical_to_mesh_axes`. Differences:
                axes that are not on the mesh are skipped; where a choice does not divide the axis
                the next is tried, and it is an error if there is none; a name without a rule is an
                error, where Flax replicates; and so is a large leaf that remains replicated because
                its axes are not on the mesh.
            default: the spec of leaves without names; None replicates them, as Flax does. Rules for
                them go into `more`.
            **more: further arguments of `Plan`.

        Returns:
            The plan.

        Raises:
            PlanError: listing the pairs that are malformed.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> rules = [("batch", ("dp", "fsdp")), ("embed", "fsdp"), ("mlp", "tp")]
            >>> plan = Plan.from_logical_axis_rules(rules, inputs=("batch",))
            >>> mesh = make_mesh((2, 4), ("fsdp", "tp"))
            >>> plan.for_inputs().resolve({"tokens": (16, 128)}, mesh).specs
            {'tokens': P('fsdp',)}
        """
        return cls(axes=rules, default=default, **more)
