"""Layouts by name as the rules that a person would write.

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
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from isoshard.core.plan.rule_patterns import matches

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
    missing = [name for name in specs if not any(matches(one, name) for one in rules)]
    return rules | dict.fromkeys(["*"] if missing else [])


def activation_rules_of(specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """What a plan says of the outputs of modules; those that lie whole are left to the compiler.

    Args:
        specs: of the outputs, by the name of the module.
    """
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
    """What a plan says of the batch: one spec, or one for each name.

    Args:
        specs: of each array of the batch, by its path.
    """
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
    found = collections.defaultdict[str, list[str]](list)
    for name in specs:
        found[_NUMBER.sub("*", name)].append(name)
    patterns = dict[str, list[str]]()
    for pattern, names in found.items():
        alike = _alike(names, specs)
        for wanted in ((pattern,), *(() if alike else _by_parity(names))):
            mine = [[name for name in names if matches(one, name)] for one in wanted]
            fits = all(
                several and _alike(several, specs) and not _others(one, several, others)
                for one, several in zip(wanted, mine, strict=True)
            )
            if fits and sum(map(len, mine)) == len(names):
                patterns |= dict(zip(wanted, mine, strict=True))
                break
        else:
            if len(names) > 1 and alike:
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
    words = pattern.split(".") if not pattern.startswith("re:") else []
    for count in range(2, len(words)):
        if words[-count][0] in "*[" or words[-count].isdigit():
            continue
        short = "*." + ".".join(words[-count:])
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
        kept = {
            pattern: one
            for pattern, one in rules.items()
            if pattern.rpartition(".")[2] != word or one != spec
        }
        whole = {name: specs[name] for name in mine if not len(specs[name])}
        for pattern, names in _patterns(whole).items():
            mixed = {name: specs[name] for name in specs}
            kept.setdefault(_shortened(pattern, names, mixed), None)
        if len(kept) + 1 < len(rules):
            rules = kept | {last: spec}
    return rules
