"""Plan: which parameter gets which spec, by name, the same for every framework.

A plan is an ordered list of rules `name pattern -> spec`. The first pattern that matches a leaf's
name decides. Names are paths joined by dots, as `nn.Module.named_parameters` writes them; pytrees
and Flax modules have the same names.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> plan = Plan({
...     "tok.*": P("model", None),             # the embedding: torch `weight`, Flax `embedding`
...     "*.qkv.*": Linear(out="model"),        # torch: P('model'), Flax: P(None, 'model')
...     "*.norm?.*": None,                     # replicated on purpose
... })
>>> plan.spec_for("blocks.0.qkv.weight", (96, 32), mesh)
P('model',)
>>> plan.spec_for("blocks.0.qkv.kernel", (32, 96), mesh)
P(None, 'model')
>>> print(plan.resolve({"tok.weight": (256, 32), "blocks.0.qkv.bias": (96,)}, mesh))
name               shape      dtype  spec         bytes/device  rule
tok.weight         (256, 32)  ?      P('model',)       8.0 KiB  tok.*
blocks.0.qkv.bias  (96,)      ?      P('model',)          96 B  *.qkv.*
total 8.1 KiB on each of 8 devices, mesh (data=2, model=4)
rules that decided nothing: '*.norm?.*'

Nothing large is replicated silently: a leaf that no rule matches is replicated only if it is small,
unless the plan has a default.

>>> plan.spec_for("head.weight", (4096, 512), mesh)
Traceback (most recent call last):
    ...
isoshard.core.plan.layout_rules.PlanError: 1 leaf larger than 1.0 MiB matches no rule:
  head.weight: shape (4096, 512), 8.0 MiB if float32
Add a rule for it (None replicates on purpose), or give the plan a default: Plan(.., default=P()).

Specs may name *logical* axes, which a table maps to the mesh; so one plan serves many meshes
(`logical`). Common plans are built in, and a product of plans merges their specs of each tensor:

>>> plan = Plan({"*.up.*": Linear(out="mlp", into="embed")}, axes={"mlp": "model", "embed": "data"})
>>> plan.spec_for("0.up.kernel", (32, 128), mesh)
P('data', 'model')
>>> plan = Plan.tensor_parallel("model") * Plan.fsdp("data", min_bytes=0)
>>> plan.spec_for("layers.0.mlp.up_proj.weight", (128, 32), mesh)
P('model', 'data')

A plan also covers the batch (`inputs`), values inside the model (`activations`), and the
optimizer's state (`for_state`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import AnyMesh
from isoshard.core.runtime.shown_text import preformatted

from .activations import ModuleActivations, activation_for, activation_rules
from .automatic import Automatic
from .difference import PlanDiff
from .freezing import UNSET, Pairs, frozen, frozen_pairs
from .imports import Imports
from .layout_rules import Linear as Linear
from .layout_rules import PlanError
from .logical import AxisTable
from .memory_rules import memory_for, memory_rules
from .model_leaves import leaves_of
from .resolved import ResolvedPlan
from .resolving import decide, resolve
from .rule_patterns import check_patterns, pairs_of, slot_rules
from .size_rules import REPLICATE_BELOW, Largest
from .slice_rules import over_dcn, slice_rules
from .standard_plans import Presets


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Presets, Imports, Automatic):
    """Ordered rules from leaf names to specs. Immutable and hashable.

    Args:
        rules: a mapping, or pairs, of pattern and spec. A pattern is a glob over the full name
            (`*` also crosses dots, `?`, `[..]`), or a regular expression over the full name after
            `re:`. A spec is anything that `shard` takes, None to replicate, or a rule: `Linear`,
            `Conv`, `Heads`, `Largest`.
        default: the spec of leaves that no rule matches. Not given: such a leaf is replicated if
            it has at most `replicate_below` bytes, and is an error otherwise.
        replicate_below: bytes, 1 MiB unless given. A leaf of unknown dtype counts 4 bytes an
            element.
        axes: a mapping, or pairs, of logical axis name and mesh axis (a tuple of them, None for
            unsplit). A name in a spec that is a key here is a logical one. Pairs may repeat a name:
            the first that fits decides. Leaves with axis names of their own (Flax metadata) follow
            them where no rule matches.
        activations: a mapping, or pairs, of a pattern for module names and the spec of the
            module's output, or an `Activation`.
        inputs: the spec of every array of the batch, or a mapping of patterns and specs.
        memory: a mapping, or pairs, of a pattern and the memory kind in which matching parameters
            or slots of an optimizer are stored: `{"*.mu.*": "pinned_host"}`. A step copies them
            from the host to the device, and back.
        dcn: a mapping, or pairs, of a mesh axis and the kinds of collectives, as HLO names them,
            that may cross slices over it: `{"replica": "all-reduce"}`.
            `iso.planner.check_crossings` compares a program with it; shardings do not depend on it.
        product: the plans of a product, as `a * b` creates them.

    Raises:
        PlanError: `rules` are neither a mapping nor pairs; a pattern is repeated, not a string or
            not a regular expression; or `axes`, `activations`, `memory` or `dcn` are malformed.

    Example:
        >>> Plan([("*.weight", ("x", None)), ("re:.*[.]bias", None)], default=P())
        Plan({'*.weight': ('x', None), 're:.*[.]bias': None}, default=P())
    """

    rules: Any = ()
    _: dataclasses.KW_ONLY
    default: Any = UNSET
    replicate_below: int = REPLICATE_BELOW
    axes: Any = ()
    activations: Any = ()
    inputs: Any = UNSET
    memory: Any = ()
    dcn: Any = ()
    product: tuple[Plan, ...] = ()

    def __post_init__(self) -> None:
        """Freeze the arguments, and check the patterns."""
        rules = tuple((pattern, frozen(spec)) for pattern, spec in pairs_of(self.rules))
        check_patterns([pattern for pattern, _ in rules])
        inputs = {"*": self.inputs} if not isinstance(self.inputs, Mapping) else self.inputs
        if self.inputs is UNSET or isinstance(self.inputs, Pairs):
            frozen_inputs = self.inputs
        else:
            check_patterns(inputs)
            frozen_inputs = frozen_pairs(inputs)
        axes = self.axes if isinstance(self.axes, AxisTable) else AxisTable(self.axes)
        for name, value in {
            "rules": rules,
            "default": frozen(self.default),
            "axes": axes,
            "activations": activation_rules(self.activations),
            "inputs": frozen_inputs,
            "memory": memory_rules(self.memory),
            "dcn": slice_rules(self.dcn),
        }.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """The constructor's call, or the product of them."""
        if self.product:
            return " * ".join(map(repr, self.product))
        args = ["{" + ", ".join(f"{p!r}: {spec!r}" for p, spec in self.rules) + "}"]
        if self.default is not UNSET:
            args.append(f"default={self.default!r}")
        if self.replicate_below != REPLICATE_BELOW:
            args.append(f"replicate_below={self.replicate_below}")
        if self.axes:
            args.append(f"axes={list(self.axes.pairs)!r}")
        if self.activations:
            args.append(f"activations={dict(self.activations)!r}")
        if self.inputs is not UNSET:
            args.append(f"inputs={dict(self.inputs)!r}")
        if self.memory:
            args.append(f"memory={dict(self.memory)!r}")
        if self.dcn:
            args.append(f"dcn={dict(self.dcn)!r}")
        return f"Plan({', '.join(args)})"

    def _repr_html_(self) -> str:
        return preformatted(" *\n".join(map(repr, self.factors)))

    @property
    def factors(self) -> tuple[Plan, ...]:
        """The plans whose product this is; a plan that is no product is its own only factor."""
        return self.product or (self,)

    def __mul__(self, other: Plan) -> Plan:
        """Merge two plans: each axis of a tensor is split as in either.

        Args:
            other: a plan over other mesh axes. What both split, `other` splits inside; `Largest`
                (of `Plan.fsdp`) chooses last, among unsplit axes if it can.

        Returns:
            The product. A leaf needs a rule in one factor only; factors' defaults count for a leaf
            without a rule if all factors that shard leaves have one. None in a factor leaves the
            leaf to the others: to replicate it, put the rule before all: `Plan({name:
            None}).otherwise(a * b)`. `resolve` raises where one mesh axis would split two axes of a
            tensor.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> plan = Plan({"w": P("tp")}) * Plan({"*": P(None, "fsdp")})
            >>> plan.spec_for("w", (8, 8), make_mesh((2, 4), ("fsdp", "tp")))
            P('tp', 'fsdp')
        """
        if not isinstance(other, Plan):
            return NotImplemented
        limit = min(self.replicate_below, other.replicate_below)
        return Plan(product=self.factors + other.factors, replicate_below=limit)

    def otherwise(self, other: Plan) -> Plan:
        """Put this plan's rules before those of another.

        Args:
            other: decides where no rule of this plan does; a product keeps its factors.

        Returns:
            A plan in which a leaf that this one has a rule for follows it alone.

        Raises:
            PlanError: this plan is a product, whose rules have no single order.

        Example:
            >>> Plan({"head.*": None}).otherwise(Plan({"head.*": P("x"), "*": P("y")}))
            Plan({'head.*': None, '*': P('y',)})
        """
        if self.product:
            raise PlanError("a product has no single list of rules; write a.otherwise(c) * b")
        if other.product:
            factors = tuple(self.otherwise(factor) for factor in other.product)
            return dataclasses.replace(other, product=factors)
        return dataclasses.replace(
            other,
            rules=_prepended(self.rules, other.rules),
            default=other.default if self.default is UNSET else self.default,
            axes=AxisTable(list(dict.fromkeys(self.axes.pairs + other.axes.pairs))),
            activations=_prepended(self.activations, other.activations),
            inputs=other.inputs if self.inputs is UNSET else self.inputs,
            memory=_prepended(self.memory, other.memory),
            dcn=over_dcn((self.dcn, other.dcn)).items(),
        )

    def memory_for(self, name: str) -> str | None:
        """The memory kind of a parameter, or of a slot of an optimizer; None without a rule.

        Example:
            >>> Plan(memory={"*.mu.*": "pinned_host"}).memory_for("0.mu.kernel")
            'pinned_host'
        """
        return memory_for((factor.memory for factor in self.factors), name)

    def over_dcn(self) -> dict[str, tuple[str, ...]]:
        """The kinds of collectives that may cross slices, by mesh axis.

        Example:
            >>> (Plan.fsdp("data") * Plan(dcn={"replica": "all-reduce"})).over_dcn()
            {'replica': ('all-reduce',)}
        """
        return over_dcn(factor.dcn for factor in self.factors)

    def spec_for(self, name: str, shape: tuple[int, ...], mesh: AnyMesh | None = None) -> P:
        """Look up the spec of one leaf.

        Args:
            name: its path, joined by dots.
            shape: its global shape.
            mesh: the mesh, or what `as_mesh` takes; it may be abstract. By default the one that
                `jax.set_mesh` has set.

        Returns:
            The canonical spec: no trailing None.

        Raises:
            PlanError: no rule matches and the leaf is large, or the spec does not fit it.
        """
        return self.resolve({name: tuple(shape)}, mesh).leaves[0].sharding.spec

    def resolve(
        self, tree: Any, mesh: AnyMesh | None = None, *, strict: bool = False
    ) -> ResolvedPlan:
        """Look up every leaf, and report all errors at once.

        Args:
            tree: a mapping from names to shapes; a module of torch or Flax; or a pytree whose
                leaves have a shape (arrays, tensors, `jax.ShapeDtypeStruct`, boxes of Flax with
                axis names); numbers count as rank 0.
            mesh: the mesh, or what `as_mesh` takes; it may be abstract. By default the one that
                `jax.set_mesh` has set.
            strict: whether it is an error that a rule decides nothing, or that a leaf, however
                small, has no rule.

        Returns:
            The sharding of each leaf, in order; `str` of it is a table.

        Raises:
            PlanError: naming each leaf that is large and matched by no rule, and each whose spec
                does not fit (axis names, rank, uneven split); under `strict` each unused rule and
                unmatched leaf.
        """
        return resolve(self, tree, mesh, strict=strict)

    def activation_for(self, module: str) -> ModuleActivations | None:
        """The rules for a module's inputs and output; see `isoshard.core.plan.activations`.

        Args:
            module: its name, joined by dots; "" is the model itself.

        Returns:
            The specs of its inputs and its output, or None if no pattern matches.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> activation = Plan(activations={"*.mlp": P("x")}).activation_for("layers.0.mlp")
            >>> activation.resolve("output", {"": (8, 4)}, make_mesh((8,), ("x",)))[""].spec
            P('x',)
        """
        return activation_for(module, ((f.activations, f.axes) for f in self.factors))

    def for_inputs(self) -> Plan:
        """Make the plan of a batch: its rules are this plan's `inputs`.

        Returns:
            A plan for `resolve` or `isoshard.shard`; arrays are named by their paths in the batch.

        Raises:
            PlanError: the plan has no rule for inputs.

        Example:
            >>> plan = Plan.data_parallel("dp") * Plan.fsdp("fsdp")
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> mesh = make_mesh((2, 4), ("dp", "fsdp"))
            >>> plan.for_inputs().resolve({"tokens": (16, 128)}, mesh).specs
            {'tokens': P(('dp', 'fsdp'),)}
        """
        plans = [
            Plan(f.inputs, axes=f.axes, replicate_below=f.replicate_below)
            for f in self.factors
            if f.inputs is not UNSET
        ]
        if not plans:
            raise PlanError("the plan has no rule for inputs; give it one: Plan(.., inputs=P(..))")
        return functools.reduce(Plan.__mul__, plans)

    def for_state(self, params: Any) -> Plan:
        """Make the plan of an optimizer's state, in which each slot follows its parameter.

        A leaf belongs to the parameter whose full name ends its own: `0.mu.blocks.0.kernel` to
        `blocks.0.kernel`. Rules that match no parameter are for slots, and come first. Other leaves
        (step counters) follow the default and the size limit.

        Args:
            params: the parameters, as for `resolve`.

        Returns:
            A plan with one exact rule per parameter that has a rule here, behind those for slots.

        Example:
            >>> Plan({"w": P("x")}).for_state({"w": (8,), "b": (8,)})
            Plan({'re:(?#w)(?:.*[.])?w': P('x',), 're:(?#b)(?:.*[.])?b': None})
        """
        if self.product:
            factors = tuple(factor.for_state(params) for factor in self.product)
            return dataclasses.replace(self, product=factors)
        leaves = leaves_of(params)
        rules = dict(slot_rules(self, [leaf.name for leaf in leaves]))
        for leaf in sorted(leaves, key=lambda leaf: -len(leaf.name)):
            for decision in decide(self, leaf, None):
                spec = decision.spec
                spec = spec.settled(leaf.size) if isinstance(spec, Largest) else spec
                label = leaf.name.replace(")", "]")
                rules[f"re:(?#{label})(?:.*[.])?{re.escape(leaf.name)}"] = spec
        return dataclasses.replace(self, rules=rules)

    def diff(self, other: Plan, tree: Any, mesh: AnyMesh | None = None) -> PlanDiff:
        """Compare the shardings of a model under two plans.

        Args:
            other: the plan after the change; this one is the plan before.
            tree: the model, as for `resolve`.
            mesh: the mesh, or what `as_mesh` takes; it may be abstract. By default the one that
                `jax.set_mesh` has set.

        Returns:
            The leaves whose spec or rule differs, and the bytes per device of both; `str` of it is
            a table.

        Raises:
            PlanError: one of the plans does not fit the model.

        Example:
            >>> from isoshard.core.layout.mesh import make_mesh
            >>> before, after = Plan({"w": None}), Plan({"w": P("x")})
            >>> print(before.diff(after, {"w": (8, 4), "b": (4,)}, make_mesh((8,), ("x",))))
            name  spec            bytes/device   rule
            w     P() -> P('x',)  128 B -> 16 B  w
            1 of 2 leaves changed, 144 B -> 32 B on each device
        """
        return self.resolve(tree, mesh).diff(other.resolve(tree, mesh))


def _prepended(first: tuple[Any, ...], then: tuple[Any, ...]) -> tuple[Any, ...]:
    """Two lists of rules as one; of a pattern in both the first rule counts."""
    patterns = {pattern for pattern, _ in first}
    return first + tuple(pair for pair in then if pair[0] not in patterns)
