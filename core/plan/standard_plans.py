"""Common plans, by mesh axes: data, tensor, sequence and expert parallelism, FSDP.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("fsdp", "tp"))
>>> plan = Plan.fsdp("fsdp", min_bytes=0) * Plan.tensor_parallel("tp")
>>> shapes = {"h.0.mlp.c_fc.weight": (128, 32), "h.0.mlp.c_fc.bias": (128,), "wte.weight": (256, 32)}
>>> print(plan.resolve(shapes, mesh))
name                 shape      dtype  spec                bytes/device  rule
h.0.mlp.c_fc.weight  (128, 32)  ?      P('tp', 'fsdp')          2.0 KiB  fsdp * column
h.0.mlp.c_fc.bias    (128,)     ?      P(('tp', 'fsdp'),)          64 B  fsdp * column
wte.weight           (256, 32)  ?      P('tp', 'fsdp')          4.0 KiB  fsdp * embedding
total 6.1 KiB on each of 8 devices, mesh (fsdp=2, tp=4)
rules that decided nothing: 'row', 'experts', 'whole'

The names that `tensor_parallel` and the others match are those of GPT-2, Llama and its relatives,
BERT, and Flax's own attention. A model with other names needs rules of its own, put before:
`Plan({"*.widen.*": Linear(out="tp")}).otherwise(Plan.tensor_parallel("tp"))`.
"""  # noqa: E501

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

from .layout_rules import Axes, Experts, Heads, Order
from .size_rules import REPLICATE_BELOW, Largest

if TYPE_CHECKING:
    from typing import Self

_LEAF = "(?:weight|kernel|bias)"
_COLUMN = (
    "q_proj|k_proj|v_proj|qkv|qkv_proj|c_attn|query_key_value|in_proj|query|key|value"
    "|gate_proj|up_proj|gate_up_proj|c_fc|fc1|fc_in|w1|w3|wi|wi_[01]|up|dense_h_to_4h"
    "|intermediate[.]dense|lm_head|head"
)
_ROW = (
    "o_proj|out_proj|c_proj|proj|out|down_proj|fc2|fc_out|w2|wo|down|dense_4h_to_h"
    "|output[.]dense|attention[.]dense"
)
_EMBEDDING = "wte|embed_tokens|tok_embeddings|token_embed|word_embeddings|tok|token|embed"
_POSITIONS = "wpe|position|pos|pos_embed|position_embeddings|token_type_embeddings"
_NORM = "[^.]*(?:norm|Norm)[^.]*|ln(?:_?[^.]+)?"


class Presets:
    """The constructors of `Plan` that need mesh axes only; `Plan` inherits them."""

    if TYPE_CHECKING:

        def __init__(self, rules: Any = (), **more: Any) -> None:
            """See `Plan`."""

    @classmethod
    def data_parallel(cls, axis: Axes = "dp") -> Self:
        """Split the batch, replicate the model.

        Args:
            axis: mesh axis or axes.

        Returns:
            The plan; `for_inputs` has the specs of the batch.

        Example:
            >>> from isoshard.core.plan import Plan
            >>> Plan.data_parallel("dp")
            Plan({}, default=None, inputs={'*': ('dp',)})
        """
        return cls(default=None, inputs=(axis,))

    @classmethod
    def fsdp(cls, axis: Axes = "fsdp", *, min_bytes: int = REPLICATE_BELOW) -> Self:
        """Split the batch, and every parameter too: each device keeps its share of both.

        The compiler gathers a parameter where it is used and scatters its gradient. With another
        split of the same parameters (`tensor_parallel`), add `batch_activations` to keep the batch
        split in between; otherwise it may choose to gather activations instead.

        Args:
            axis: mesh axis or axes.
            min_bytes: parameters of fewer bytes are replicated.

        Returns:
            A plan that splits each parameter along its largest divisible axis (`Largest`).

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> mesh = make_mesh((8,), ("fsdp",))
            >>> Plan.fsdp().spec_for("up.weight", (4096, 1024), mesh)
            P('fsdp',)
            >>> Plan.fsdp().spec_for("up.kernel", (1024, 4096), mesh)
            P(None, 'fsdp')
        """
        return cls({"re:(?#fsdp).*": Largest(axis, min_bytes)}, inputs=(axis,))

    @classmethod
    def tensor_parallel(cls, axis: Axes = "tp", *, weights: Order = "out_in") -> Self:
        """Split each layer of a transformer, as Megatron does.

        Column-parallel layers (query, key, value, the first of an MLP, the head) split their
        outputs, row-parallel layers their inputs, so that a block has two all-reduces; embeddings
        split the vocabulary; norms and positions are replicated. Stacked experts (`experts.up`,
        `[expert, ..]`) are split along the stack, or along their largest axis that divides where
        the number of experts does not, or `expert_parallel` splits the stack.

        Args:
            axis: mesh axis or axes.
            weights: the order of a `weight`: "out_in" as `torch.nn.Linear` has it, "in_out" for
                the `Conv1D` of GPT-2 in transformers. A `kernel` is always in before out.

        Returns:
            The plan. It goes by names, so read the table: a large leaf with another name is an
            error, unless another factor splits it.

        Raises:
            PlanError: `weights` is something else.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> mesh = make_mesh((2, 4), ("dp", "tp"))
            >>> Plan.tensor_parallel().spec_for("h.0.mlp.c_proj.kernel", (128, 32), mesh)
            P('tp',)

        Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3.
        """
        return cls(
            {
                _named("column", _COLUMN, _LEAF): Heads(out=axis, weights=weights),
                _named("row", _ROW, _LEAF): Heads(into=axis, weights=weights),
                _named("embedding", _EMBEDDING, "(?:weight|embedding)"): P(axis),
                _named("experts", "experts", "[^.]+"): Largest(axis, 0, stacked=True),
                _UNSPLIT: None,
            }
        )

    @classmethod
    def batch_activations(cls, axis: Axes = "fsdp", *, modules: str | None = None) -> Self:
        """Keep activations between layers split along the batch.

        Rules for activations only: the first axis of the outputs of embeddings, linear layers and
        norms; the other axes are left to the compiler, or to other factors. Without it the compiler
        may propagate the sharding of a parameter rather than that of the batch.

        Args:
            axis: mesh axis or axes; the one that splits the batch.
            modules: a pattern for the names of other modules; by default those that
                `tensor_parallel` matches, without positions.

        Returns:
            The plan, to be multiplied with the others.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> plan = Plan.batch_activations("fsdp") * Plan.sequence_parallel("tp")
            >>> norm = plan.activation_for("h.0.ln_1")
            >>> norm.resolve("output", {"": (8, 64, 32)}, make_mesh((2, 4), ("fsdp", "tp")))[""].spec
            P('fsdp', 'tp', UNCONSTRAINED)
        """  # noqa: E501
        pattern = f"re:(?#batch)(?:.*[.])?(?:{_EMBEDDING}|{_COLUMN}|{_ROW}|{_NORM})"
        return cls(activations={modules or pattern: (axis, ...)})

    @classmethod
    def sequence_parallel(cls, axis: Axes = "tp", *, sequence: int = 1) -> Self:
        """Split activations between layers along the sequence.

        Rules for activations only. Values between tensor-parallel blocks (the outputs of
        embeddings, norms and row-parallel layers) are split along the sequence, instead of
        replicated on each device of `axis`; outputs of column-parallel layers are split along the
        features. The batch is left to the compiler, or to `batch_activations`.

        Args:
            axis: mesh axis or axes; the one of `tensor_parallel`.
            sequence: the axis of an activation along which the sequence runs.

        Returns:
            The plan, to be multiplied with `Plan.tensor_parallel`.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> norm = Plan.sequence_parallel("tp").activation_for("h.0.ln_1")
            >>> norm.resolve("output", {"": (8, 64, 32)}, make_mesh((2, 4), ("dp", "tp")))[""].spec
            P(UNCONSTRAINED, 'tp', UNCONSTRAINED)

        Source: Korthikanti et al., Reducing Activation Recomputation (arXiv:2205.05198), section 4.
        """
        between = (*(P.UNCONSTRAINED,) * sequence, axis, ...)
        return cls(
            activations={
                f"re:(?#sequence)(?:.*[.])?(?:{_NORM}|{_ROW}|{_EMBEDDING})": between,
                f"re:(?#features)(?:.*[.])?(?:{_COLUMN})": (..., axis),
            }
        )

    @classmethod
    def expert_parallel(cls, axis: Axes = "ep", *, experts: str = "experts") -> Self:
        """Give each device its share of the experts of a mixture.

        Args:
            axis: mesh axis or axes.
            experts: the name of the module that contains the experts. Its parameters are stacked:
                `[expert, ..]`.

        Returns:
            A plan that splits the first axis of each; routers are replicated.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> from isoshard.core.plan import Plan
            >>> mesh = make_mesh((2, 4), ("dp", "ep"))
            >>> Plan.expert_parallel().spec_for("h.0.moe.experts.up", (8, 64, 32), mesh)
            P('ep',)
        """
        return cls(
            {
                f"re:(?#experts)(?:.*[.])?{re.escape(experts)}[.].*": Experts(axis, experts),
                _named("router", "router|gate", _LEAF): None,
            }
        )


def _named(role: str, modules: str, leaves: str) -> str:
    return f"re:(?#{role})(?:.*[.])?(?:{modules})[.]{leaves}"


_UNSPLIT = f"re:(?#whole)(?:.*[.])?(?:(?:{_NORM}|{_POSITIONS})(?:[.][^.]+)?)"
