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

Numbers become `*`, then names are shortened from the front as far as no other parameter is meant.
If most weights lie alike, one rule for all of them stands last. Layers of which every second lies
otherwise are told by their last digit. Of modules those inside come first, so that what is said of
all layers is said once:

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
    """What a plan decides of a step's parameters and batch, by name.

    Args:
        fixed: the user's plan; None decides nothing.
        step: the step.
        mesh: the mesh.

    Raises:
        PlanError: a rule names an axis that the mesh has not, or does not fit.
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
            f"fixed= does not go with the mesh ({axes}): {error}. Name one of its axes, or give "
            "search a mesh that has yours"
        ) from None
    return result


def forced_layouts(
    layouts: Mapping[str, NamedSharding], groups: Sequence[LeafGroup], mesh: Mesh
) -> dict[int, ArraySharding]:
    """Layouts of groups as numbers of mesh axes.

    Args:
        layouts: by name of an input; of a group the first name that is there counts.
        groups: what is laid out.
        mesh: the mesh.
    """
    result: dict[int, ArraySharding] = {}
    for index, group in enumerate(groups):
        name = next((name for name in group.names if name in layouts), None)
        if name is not None:
            result[index] = _numbered(layouts[name].spec, len(group.shape), mesh)
        elif group.names[0].startswith("closed_over."):
            result[index] = ((),) * len(group.shape)
    return result


def joined(fixed: Plan | None, result: Plan) -> Plan:
    """The user's rules, and behind them those found."""
    if fixed is None:
        return result
    if fixed.product:
        return dataclasses.replace(
            result,
            activations=tuple(pair for factor in fixed.factors for pair in factor.activations),
            memory=tuple(pair for factor in fixed.factors for pair in factor.memory),
        )
    both = _without_default(fixed, UNSET).otherwise(result)
    if fixed.inputs is UNSET or result.inputs is UNSET:
        return both
    mine = dict(fixed.inputs)
    more = {pattern: spec for pattern, spec in result.inputs if pattern not in mine}
    return dataclasses.replace(both, inputs=mine | more)


def _without_default(plan: Plan, default: object = None) -> Plan:
    if plan.product:
        factors = tuple(dataclasses.replace(one, default=default) for one in plan.product)
        return dataclasses.replace(plan, product=factors)
    return dataclasses.replace(plan, default=default)


def _leaves(step: TracedStep, roles: Sequence[str]) -> list[ModelLeaf]:
    return [
        ModelLeaf(leaf.name, leaf.shape, leaf.dtype.name, itemsize=leaf.dtype.itemsize)
        for leaf in step.inputs
        if leaf.role in roles and not leaf.name.startswith("closed_over.")
    ]


def _numbered(spec: PartitionSpec, rank: int, mesh: Mesh) -> ArraySharding:
    numbered = {name: index for index, name in enumerate(mesh.axis_names)}
    entries = (*spec, *(None,) * rank)[:rank]
    return tuple(
        tuple(numbered[name] for name in axis_names(entry) if mesh.shape[name] > 1)
        for entry in entries
    )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PARITY = ("[02468]", "[13579]")


def rules_of(specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec | None]:
    """Rules that give each name its spec, the first that matches deciding.

    Args:
        specs: of each parameter by name, without trailing None.

    Returns:
        Patterns and specs; None replicates. Each decides something, and each name has one.
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
    """What a plan says of the outputs of modules; those that lie whole are left to the compiler."""
    left = dict(specs)
    rules = dict[str, PartitionSpec]()
    depths = {name: name.count(".") for name in specs}
    for depth in sorted(set(depths.values()), reverse=True):
        mine = {name: specs[name] for name in specs if depths[name] == depth}
        for pattern, names in _patterns(mine, left).items():
            spec = specs[names[0]]
            if len(spec):
                rules.setdefault(_shortened(pattern, names, left), spec)
                left = {name: one for name, one in left.items() if name not in names}
    return rules


def input_rules_of(specs: Mapping[str, PartitionSpec]) -> object:
    """What a plan says of the batch: one spec, or one for each name."""
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
            alone = all(specs[one] == spec for one in specs if matches(last, one))
            rules[last if alone else name] = spec if len(spec) else None
    return rules | {"*": common if len(common) else None}


def _patterns(
    specs: Mapping[str, PartitionSpec], within: Mapping[str, PartitionSpec] | None = None
) -> dict[str, list[str]]:
    """Names with numbers replaced as far as those of one pattern lie alike.

    A pattern matches by chance no other name of `within` that lies otherwise.
    """
    others = specs if within is None else within
    result = collections.defaultdict[str, list[str]](list)
    for name in specs:
        result[_NUMBER.sub("*", name)].append(name)
    patterns = dict[str, list[str]]()
    for pattern, names in result.items():
        same = _alike(names, specs)
        for target in ((pattern,), *(() if same else _by_parity(names))):
            mine = [[name for name in names if matches(axis, name)] for axis in target]
            fits = all(
                several and _alike(several, specs) and not _others(axis, several, others)
                for axis, several in zip(target, mine, strict=True)
            )
            if fits and sum(map(len, mine)) == len(names):
                patterns |= dict(zip(target, mine, strict=True))
                break
        else:
            if len(names) > 1 and same:
                digits = re.escape(pattern).replace(r"\*", "[0-9]+").replace(r"\.", "[.]")
                patterns[f"re:{digits}"] = names
            else:
                patterns |= {name: [name] for name in names}
    return patterns


def _by_parity(names: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Patterns that tell even numbers from odd ones, at each place that names have one."""
    spans = [match.span() for match in _NUMBER.finditer(names[0])]
    if len(names) < 3:
        return
    for start, end in spans:
        head, tail = _NUMBER.sub("*", names[0][:start]), _NUMBER.sub("*", names[0][end:])
        even, odd = (f"{head}*{digits}{tail}" for digits in _PARITY)
        yield even, odd


def _alike(names: Iterable[str], specs: Mapping[str, PartitionSpec]) -> bool:
    return len({specs[name] for name in names}) == 1


def _others(pattern: str, names: list[str], specs: Mapping[str, PartitionSpec]) -> list[str]:
    """Names that a pattern matches by chance and that lie otherwise."""
    spec = specs[names[0]]
    return [name for name in specs if matches(pattern, name) and specs[name] != spec]


def _shortened(pattern: str, names: list[str], specs: Mapping[str, PartitionSpec]) -> str:
    parts = pattern.split(".") if not pattern.startswith("re:") else []
    for count in range(2, len(parts)):
        if parts[-count][0] in "*[" or parts[-count].isdigit():
            continue
        short = "*." + ".".join(parts[-count:])
        if all(matches(short, name) for name in names) and not _others(short, names, specs):
            return short
    return pattern


def _with_last(
    rules: dict[str, PartitionSpec | None], specs: Mapping[str, PartitionSpec]
) -> dict[str, PartitionSpec | None]:
    """The same with one rule for most names of one last word, if that makes it shorter."""
    for word in sorted({name.rpartition(".")[2] for name in specs}):
        last = f"*.{word}"
        mine = [name for name in specs if matches(last, name)]
        counts = collections.Counter(
            spec for pattern, spec in rules.items() if pattern.rpartition(".")[2] == word
        )
        if not counts or last in rules:
            continue
        spec = max(counts, key=lambda one: (counts[one], repr(one)))
        saved = {
            pattern: rule
            for pattern, rule in rules.items()
            if pattern.rpartition(".")[2] != word or rule != spec
        }
        full = {name: specs[name] for name in mine if not len(specs[name])}
        for pattern, names in _patterns(full).items():
            mixed = {name: specs[name] for name in specs}
            saved.setdefault(_shortened(pattern, names, mixed), None)
        if len(saved) + 1 < len(rules):
            rules = saved | {last: spec}
    return rules
