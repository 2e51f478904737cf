"""Plan: which parameter gets which spec, by name, the same for every framework.

A plan is an ordered list of rules `name pattern -> spec`. The first pattern that matches a leaf's
name decides. Names are paths joined by dots, as `nn.Module.named_parameters` writes them; pytrees
and Flax modules are named alike.

>>> from isoshard.core.mesh import make_mesh
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

Nothing large is replicated without a word: a leaf that no rule matches is replicated only if it is
small, unless the plan gives a default.

>>> plan.spec_for("head.weight", (4096, 512), mesh)
Traceback (most recent call last):
    ...
isoshard.core.rules.PlanError: 1 leaf larger than 1.0 MiB matches no rule:
  head.weight: shape (4096, 512), 8.0 MiB if float32
Add a rule for it (None replicates on purpose), or give the plan a default: Plan(.., default=P()).
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import ShardingError
from .hf_plan import rules_of
from .mesh import as_mesh
from .metrics import human_bytes
from .resolved import BY_DEFAULT, BY_SIZE, ResolvedLeaf, ResolvedPlan, named_leaves
from .rules import Axes, Conv, LayoutRule, Linear, PlanError
from .spec import normalize_spec

__all__ = ["REPLICATE_BELOW", "Conv", "LayoutRule", "Linear", "Plan", "PlanError"]

REPLICATE_BELOW = 1 << 20
_BYTES_IF_UNKNOWN = 4


class _Unset(enum.Enum):
    """Marks a default that was not given, as None means replicate."""

    UNSET = "no default"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Ordered rules from leaf names to specs. Immutable and hashable.

    Args:
        rules: a mapping, or pairs, of pattern and spec. A pattern is a glob over the whole name
            (`*` also crosses dots, `?`, `[..]`), or a regular expression over the whole name after
            `re:`. A spec is anything that `shard` takes, None to replicate, or `Linear` / `Conv`.
        default: the spec of leaves that no rule matches. Not given: such a leaf is replicated if
            it has at most `replicate_below` bytes, and is an error otherwise.
        replicate_below: bytes, 1 MiB unless given. A leaf of unknown dtype counts 4 bytes an
            element.

    Raises:
        PlanError: a pattern is given twice, is no string or no regular expression.

    Example:
        >>> Plan([("*.weight", ("x", None)), ("re:.*[.]bias", None)], default=P())
        Plan({'*.weight': ('x', None), 're:.*[.]bias': None}, default=P())
    """

    rules: Any = ()
    _: dataclasses.KW_ONLY
    default: Any = _Unset.UNSET
    replicate_below: int = REPLICATE_BELOW

    def __post_init__(self) -> None:
        """Freeze the rules into a tuple of pairs, and check the patterns."""
        pairs = self.rules.items() if isinstance(self.rules, Mapping) else self.rules
        rules = tuple((pattern, _frozen(spec)) for pattern, spec in pairs)
        _check_patterns([pattern for pattern, _ in rules])
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "default", _frozen(self.default))

    @classmethod
    def from_hf_tp_plan(
        cls, source: Any, axis: Axes = "model", *, prefix: str = "", default: Any = None
    ) -> Plan:
        """Take over the tensor-parallel plan of a Hugging Face model.

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
            >>> from isoshard.core.mesh import make_mesh
            >>> styles = {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}
            >>> plan = Plan.from_hf_tp_plan(styles, axis="model")
            >>> mesh = make_mesh((2, 4), ("data", "model"))
            >>> shapes = {"layers.0.q_proj.weight": (8, 4), "layers.0.o_proj.weight": (4, 8)}
            >>> plan.resolve(shapes, mesh).specs
            {'layers.0.q_proj.weight': P('model',), 'layers.0.o_proj.weight': P(None, 'model')}
        """
        return cls(rules_of(source, axis, prefix), default=default)

    def __repr__(self) -> str:
        """The constructor's call."""
        parts = ["{" + ", ".join(f"{p!r}: {spec!r}" for p, spec in self.rules) + "}"]
        if self.default is not _Unset.UNSET:
            parts.append(f"default={self.default!r}")
        if self.replicate_below != REPLICATE_BELOW:
            parts.append(f"replicate_below={self.replicate_below}")
        return f"Plan({', '.join(parts)})"

    def spec_for(self, name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
        """Look up the spec of one leaf.

        Args:
            name: its path, joined by dots.
            shape: its global shape.
            mesh: the mesh, or what `as_mesh` takes.

        Returns:
            The canonical spec: no trailing None.

        Raises:
            PlanError: no rule matches and the leaf is large, or the spec does not fit it.
        """
        return self.resolve({name: tuple(shape)}, mesh).leaves[0].sharding.spec

    def resolve(self, tree: Any, mesh: Mesh) -> ResolvedPlan:
        """Look up every leaf, and say everything that is wrong at once.

        Args:
            tree: a mapping from names to shapes, or a pytree whose leaves have a shape (arrays,
                tensors, `jax.ShapeDtypeStruct`); numbers count as rank 0.
            mesh: the mesh, or what `as_mesh` takes.

        Returns:
            The layout of each leaf, in order; `str` of it is a table.

        Raises:
            PlanError: naming each leaf that is large and matched by no rule, and each whose spec
                does not fit (axis names, rank, uneven split).
        """
        mesh = as_mesh(mesh)
        resolved, faults, large = [], [], []
        for name, shape, dtype in _named_shapes(tree):
            pattern, spec = self._decide(name, _size(shape, dtype))
            if pattern is None:
                large.append((name, shape, dtype))
                continue
            try:
                resolved.append(_resolve_leaf(name, shape, dtype, pattern, spec, mesh))
            except ShardingError as error:
                faults.append(f"{error} [rule {pattern!r}]")
        if faults or large:
            raise PlanError(_complaint(faults, large, self.replicate_below)) from None
        used = {leaf.rule for leaf in resolved}
        unused = tuple(pattern for pattern, _ in self.rules if pattern not in used)
        return ResolvedPlan(tuple(resolved), mesh, unused)

    def for_state(self, params: Any) -> Plan:
        """Make the plan of an optimizer's state, in which each slot follows its parameter.

        A leaf belongs to the parameter whose whole name ends its own: `0.mu.blocks.0.kernel` to
        `blocks.0.kernel`. Other leaves (step counters) follow the default and the size limit.

        Args:
            params: the parameters, as for `resolve`.

        Returns:
            A plan with one exact rule per parameter that has a rule here.

        Example:
            >>> Plan({"w": P("x")}).for_state({"w": (8,), "b": (8,)})
            Plan({'re:(?:.*[.])?w': P('x',), 're:(?:.*[.])?b': None})
        """
        rules = {}
        for name, shape, dtype in sorted(_named_shapes(params), key=lambda leaf: -len(leaf[0])):
            pattern, spec = self._decide(name, _size(shape, dtype))
            if pattern is not None:
                rules[f"re:(?:.*[.])?{re.escape(name)}"] = spec
        return dataclasses.replace(self, rules=rules)

    def _decide(self, name: str, size: int) -> tuple[str | None, Any]:
        for pattern, spec in self.rules:
            if _matcher(pattern).fullmatch(name):
                return pattern, spec
        if self.default is not _Unset.UNSET:
            return BY_DEFAULT, self.default
        return (BY_SIZE, None) if size <= self.replicate_below else (None, None)


def _named_shapes(tree: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    if isinstance(tree, Mapping) and all(map(_is_shape, tree.values())):
        return [(name, tuple(shape), None) for name, shape in tree.items()]
    named = named_leaves(tree)
    wrong = [f"  {n}: {type(x).__name__}" for n, x in named if not hasattr(x, "shape") and _odd(x)]
    if wrong:
        raise PlanError("\n".join(["a plan lays out arrays and numbers, not:", *wrong]))
    return [(n, tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)) for n, x in named]


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def _odd(leaf: Any) -> bool:
    return not isinstance(leaf, int | float | complex)


def _size(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * getattr(dtype, "itemsize", _BYTES_IF_UNKNOWN)


def _resolve_leaf(
    name: str, shape: tuple[int, ...], dtype: Any, pattern: str, spec: Any, mesh: Mesh
) -> ResolvedLeaf:
    if isinstance(spec, LayoutRule):
        spec = spec.spec(name, len(shape))
    spec = normalize_spec(P() if spec is None else spec, mesh, len(shape), shape=shape, name=name)
    sharding = NamedSharding(mesh, spec)
    size = _size(sharding.shard_shape(shape), dtype)
    dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")
    return ResolvedLeaf(name, shape, dtype_name, sharding, size, pattern)


def _frozen(spec: Any) -> Any:
    if isinstance(spec, list) or type(spec) is tuple:
        return tuple(map(_frozen, spec))
    return spec


@functools.lru_cache(maxsize=4096)
def _matcher(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    return re.compile(fnmatch.translate(pattern))


def _check_patterns(patterns: Iterable[Any]) -> None:
    wrong = [f"{p!r} is no string" for p in patterns if not isinstance(p, str)]
    texts = [p for p in patterns if isinstance(p, str)]
    wrong += [f"{p!r} is given twice" for p in dict.fromkeys(texts) if texts.count(p) > 1]
    for pattern in dict.fromkeys(texts):
        try:
            _matcher(pattern)
        except re.error as error:
            wrong.append(f"{pattern!r} is no regular expression: {error}")
    if wrong:
        raise PlanError(f"the patterns of a plan are names, globs or 're:..': {'; '.join(wrong)}")


def _complaint(faults: list[str], large: list[tuple[Any, ...]], limit: int) -> str:
    lines = []
    if faults:
        lines.append(f"the specs of {_leaves(len(faults))} do not fit:")
        lines += [f"  {fault}" for fault in faults]
    if large:
        matches = "matches" if len(large) == 1 else "match"
        lines.append(f"{_leaves(len(large))} larger than {human_bytes(limit)} {matches} no rule:")
        lines += [_large_line(*leaf) for leaf in large]
        what = "it" if len(large) == 1 else "each"
        lines.append(
            f"Add a rule for {what} (None replicates on purpose), or give the plan a default: "
            "Plan(.., default=P())."
        )
    return "\n".join(lines)


def _leaves(count: int) -> str:
    return f"{count} leaf" if count == 1 else f"{count} leaves"


def _large_line(name: str, shape: tuple[int, ...], dtype: Any) -> str:
    size = human_bytes(_size(shape, dtype))
    of = f"{size} if float32" if dtype is None else f"{str(dtype).removeprefix('torch.')}, {size}"
    return f"  {name}: shape {shape}, {of}"
