"""Rules of plans: those that a user fixes, and shardings by name as the rules a person would write.

>>> P = PartitionSpec
>>> specs = {f"layers.{n}.up_proj.weight": P("model", "data") for n in range(2)}
>>> specs |= {f"layers.{n}.norm.weight": P() for n in range(2)} | {"head.weight": P("model")}
>>> rules = rules_of(specs)
>>> for pattern, spec in rules.items():
...     print(pattern, spec)
*.up_proj.weight P('model', 'data')
head.weight P('model',)
* None

Indices become `*`, then names are shortened from the front as far as no other parameter matches.
If most weights have the same spec, one rule for all of them comes last. Where every second layer
has another spec, the patterns match the last digit. Rules of inner modules come first, so that one
rule covers all layers:

>>> outs = {"embed": P("data"), "layers.0": P("data"), "layers.0.up": P(None, "model")}
>>> outs |= {"layers.1": P("data"), "layers.1.up": P(None, "model")}
>>> activation_rules_of(outs)
{'layers.*.up': P(None, 'model'), 'layers.*': P('data',), 'embed': P('data',)}
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import (
    UNSET,
    ModelLeaf,
    Plan,
    PlanError,
    ShardingError,
    TracedStep,
    matches,
    resolve_leaves,
)
from isoshard.core.kit import spec_axis_names as axis_names

from ..propagation.factors import ArraySharding
from .named_dimensions import LeafGroup


def fixed_layouts(fixed: Plan | None, step: TracedStep, mesh: Mesh) -> dict[str, NamedSharding]:
    """The shardings of a step's parameters and batch that a plan decides, by name.

    Args:
        fixed: the user's plan; None decides nothing.
        step: the step.
        mesh: the mesh.

    Raises:
        PlanError: a rule does not fit, or names an axis that the mesh does not have.
    """
    if fixed is None:
        return {}
    open_ended = _without_default(fixed)
    result: dict[str, NamedSharding] = {}
    leaves = _leaves(step, ("parameter", "buffer"))
    try:
        resolved = resolve_leaves(open_ended, leaves, mesh)
        undecided = set(resolved.unmatched)
        result |= {n: sharding for n, sharding in resolved.shardings.items() if n not in undecided}
        if any(factor.inputs is not UNSET for factor in fixed.factors):
            inputs = resolve_leaves(fixed.for_inputs(), _leaves(step, ("input",)), mesh)
            undecided = set(inputs.unmatched)
            result |= {
                n: sharding for n, sharding in inputs.shardings.items() if n not in undecided
            }
    except ShardingError as error:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise PlanError(
            f"fixed= does not match the mesh ({axes}): {error}. Name one of its axes, or pass a "
            "mesh that has yours"
        ) from None
    return result


def forced_layouts(
    layouts: Mapping[str, NamedSharding], groups: Sequence[LeafGroup], mesh: Mesh
) -> dict[int, ArraySharding]:
    """Shardings of groups as indices of mesh axes.

    Args:
        layouts: by name of an input; of a group the first name in it counts.
        groups: the groups of leaves.
        mesh: the mesh.
    """
    result: dict[int, ArraySharding] = {}
    for index, group in enumerate(groups):
        name = next((name for name in group.names if name in layouts), None)
        if name is not None:
            result[index] = _axis_indices(layouts[name].spec, len(group.shape), mesh)
        elif group.names[0].startswith("closed_over."):
            result[index] = ((),) * len(group.shape)
    return result


def joined(fixed: Plan | None, derived: Plan) -> Plan:
    """The user's rules, followed by those of the search."""
    if fixed is None:
        return derived
    if fixed.product:
        return dataclasses.replace(
            derived,
            activations=tuple(pair for factor in fixed.factors for pair in factor.activations),
            memory=tuple(pair for factor in fixed.factors for pair in factor.memory),
        )
    both = _without_default(fixed, UNSET).otherwise(derived)
    if fixed.inputs is UNSET or derived.inputs is UNSET:
        return both
    fixed_inputs = dict(fixed.inputs)
    more = {pattern: spec for pattern, spec in derived.inputs if pattern not in fixed_inputs}
    return dataclasses.replace(both, inputs=fixed_inputs | more)


def _without_default(plan: Plan, default: object = None) -> Plan:
    if plan.product:
        factors = tuple(dataclasses.replace(factor, default=default) for factor in plan.product)
        return dataclasses.replace(plan, product=factors)
    return dataclasses.replace(plan, default=default)


def _leaves(step: TracedStep, roles: Sequence[str]) -> list[ModelLeaf]:
    return [
        ModelLeaf(leaf.name, leaf.shape, leaf.dtype.name, itemsize=leaf.dtype.itemsize)
        for leaf in step.inputs
        if leaf.role in roles and not leaf.name.startswith("closed_over.")
    ]


def _axis_indices(spec: PartitionSpec, rank: int, mesh: Mesh) -> ArraySharding:
    index_of = {name: index for index, name in enumerate(mesh.axis_names)}
    entries = (*spec, *(None,) * rank)[:rank]
    return tuple(
        tuple(index_of[name] for name in axis_names(entry) if mesh.shape[name] > 1)
        for entry in entries
    )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PARITY = ("[02468]", "[13579]")


def rules_of(specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec | None]:
    """Rules that give each name its spec; the first that matches decides.

    Args:
        specs: of each parameter by name, without trailing None.

    Returns:
        Patterns and specs; None replicates. No rule is redundant, and each name matches one.
    """
    rules = dict[str, PartitionSpec | None]()
    for pattern, names in _patterns(specs).items():
        spec = specs[names[0]]
        if len(spec):
            rules.setdefault(_shortened(pattern, names, specs), spec)
    rules = _with_last(rules, specs)
    missing = [name for name in specs if not any(matches(rule, name) for rule in rules)]
    return rules | dict.fromkeys(["*"] if missing else [])


def activation_rules_of(specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Rules for the outputs of modules; unsharded ones are left to the compiler."""
    remaining = dict(specs)
    rules = dict[str, PartitionSpec]()
    depths = {name: name.count(".") for name in specs}
    for depth in sorted(set(depths.values()), reverse=True):
        at_depth = {name: specs[name] for name in specs if depths[name] == depth}
        for pattern, names in _patterns(at_depth, remaining).items():
            spec = specs[names[0]]
            if len(spec):
                rules.setdefault(_shortened(pattern, names, remaining), spec)
                remaining = {name: other for name, other in remaining.items() if name not in names}
    return rules


def input_rules_of(specs: Mapping[str, PartitionSpec]) -> object:
    """A plan's `inputs`: one spec for the batch, or one for each name."""
    different = set(specs.values())
    if len(different) == 1:
        spec = next(iter(different))
        return spec if len(spec) else None
    count = collections.Counter(specs.values())
    common = max(count, key=lambda spec: (count[spec], len(spec), repr(spec)))
    rules: dict[str, PartitionSpec | None] = {}
    for name, spec in specs.items():
        if spec != common:
            last = "*" + name.rpartition(".")[2]
            alone = all(specs[other] == spec for other in specs if matches(last, other))
            rules[last if alone else name] = spec if len(spec) else None
    return rules | {"*": common if len(common) else None}


def _patterns(
    specs: Mapping[str, PartitionSpec], within: Mapping[str, PartitionSpec] | None = None
) -> dict[str, list[str]]:
    """Names with indices replaced, as far as those of one pattern have the same spec.

    A pattern matches no other name of `within` with another spec.
    """
    others = specs if within is None else within
    by_pattern = collections.defaultdict[str, list[str]](list)
    for name in specs:
        by_pattern[_NUMBER.sub("*", name)].append(name)
    patterns = dict[str, list[str]]()
    for pattern, names in by_pattern.items():
        same = _same_spec(names, specs)
        for target in ((pattern,), *(() if same else _by_parity(names))):
            matched = [[name for name in names if matches(axis, name)] for axis in target]
            fits = all(
                several and _same_spec(several, specs) and not _others(axis, several, others)
                for axis, several in zip(target, matched, strict=True)
            )
            if fits and sum(map(len, matched)) == len(names):
                patterns |= dict(zip(target, matched, strict=True))
                break
        else:
            if len(names) > 1 and same:
                digits = re.escape(pattern).replace(r"\*", "[0-9]+").replace(r"\.", "[.]")
                patterns[f"re:{digits}"] = names
            else:
                patterns |= {name: [name] for name in names}
    return patterns


def _by_parity(names: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Pairs of patterns for even and for odd layers, for each index in the names."""
    spans = [match.span() for match in _NUMBER.finditer(names[0])]
    if len(names) < 3:
        return
    for start, end in spans:
        head, tail = _NUMBER.sub("*", names[0][:start]), _NUMBER.sub("*", names[0][end:])
        even, odd = (f"{head}*{digits}{tail}" for digits in _PARITY)
        yield even, odd


def _same_spec(names: Iterable[str], specs: Mapping[str, PartitionSpec]) -> bool:
    return len({specs[name] for name in names}) == 1


def _others(pattern: str, names: list[str], specs: Mapping[str, PartitionSpec]) -> list[str]:
    """Names with another spec that a pattern matches, too."""
    spec = specs[names[0]]
    return [name for name in specs if matches(pattern, name) and specs[name] != spec]


def _shortened(pattern: str, names: list[str], specs: Mapping[str, PartitionSpec]) -> str:
    segments = pattern.split(".") if not pattern.startswith("re:") else []
    for count in range(2, len(segments)):
        if segments[-count][0] in "*[" or segments[-count].isdigit():
            continue
        short = "*." + ".".join(segments[-count:])
        if all(matches(short, name) for name in names) and not _others(short, names, specs):
            return short
    return pattern


def _with_last(
    rules: dict[str, PartitionSpec | None], specs: Mapping[str, PartitionSpec]
) -> dict[str, PartitionSpec | None]:
    """The rules with one for most names of the same last word, if that is shorter."""
    for word in sorted({name.rpartition(".")[2] for name in specs}):
        last = f"*.{word}"
        matched = [name for name in specs if matches(last, name)]
        counts = collections.Counter(
            spec for pattern, spec in rules.items() if pattern.rpartition(".")[2] == word
        )
        if not counts or last in rules:
            continue
        spec = max(counts, key=lambda rule: (counts[rule], repr(rule)))
        saved = {
            pattern: rule
            for pattern, rule in rules.items()
            if pattern.rpartition(".")[2] != word or rule != spec
        }
        full = {name: specs[name] for name in matched if not len(specs[name])}
        for pattern, names in _patterns(full).items():
            mixed = {name: specs[name] for name in specs}
            saved.setdefault(_shortened(pattern, names, mixed), None)
        if len(saved) + 1 < len(rules):
            rules = saved | {last: spec}
    return rules
