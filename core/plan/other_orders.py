"""Rules for another framework's leaves: torch's `weight[out, in]` is Flax's `kernel[in, out]`.

A rule that names `*.q_proj.weight` says nothing of a Flax model. If a later rule for everything
takes its kernel, the model would be laid out otherwise than the plan says, without a word. So that
is a fault, which tells the rule for both. Where another rule decides for leaves of the model's own
name, the plan is meant for it as it is.

>>> in_both_orders("*.q_proj.weight", P("model", "data"), "kernel")
"'*.q_proj.*': Linear(out='model', into='data')"
>>> in_both_orders("wte.embedding", P("model"), "weight")
"'wte.*': P('model',)"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from .layout_rules import LayoutRule, Linear, PlanError
from .resolved import BY_DEFAULT
from .rule_patterns import matches

_TWINS: Mapping[str, tuple[str, ...]] = {
    "weight": ("kernel", "embedding", "scale"),
    "kernel": ("weight",),
    "embedding": ("weight",),
    "scale": ("weight",),
}


def check_orders(
    rules: Sequence[tuple[str, Any]],
    names: Sequence[str],
    used: Collection[str],
    decides: Callable[[str], str | None],
) -> None:
    """Refuse rules that miss a model only since it calls its leaves otherwise.

    Args:
        rules: of one plan, in order.
        names: of all leaves.
        used: patterns that decided for some leaf.
        decides: the pattern of this plan that decides for a leaf, or a word for what does; None:
            nothing.

    Raises:
        PlanError: naming each rule and a leaf that it misses.
    """
    own = {pattern.rpartition(".")[2] for pattern in used}
    missed = [
        f"  {pattern!r} decides nothing, and {name} {_laid_out(decides(name))}; write "
        f"{in_both_orders(pattern, spec, name.rpartition('.')[2])}"
        for number, (pattern, spec) in enumerate(rules)
        if pattern not in used and isinstance(spec, LayoutRule | P | tuple)
        for name in _missed(pattern, {one for one, _ in rules[number + 1 :]}, names, decides)
        if name.rpartition(".")[2] not in own
    ]
    if missed:
        raise PlanError(
            "the plan names leaves as another framework does (torch weight[out, in], Flax "
            "kernel[in, out]):\n" + "\n".join(missed)
        )


def in_both_orders(pattern: str, spec: Any, other: str) -> str:
    """The rule that says the same of either framework's leaf.

    Args:
        pattern: of a rule, that ends in what one framework calls a leaf.
        spec: of the rule.
        other: what the other framework calls it.
    """
    head, _, last = pattern.rpartition(".")
    if "kernel" in (last, other) and not isinstance(spec, LayoutRule):
        first, second = (*spec, None, None)[:2]
        out, into = (first, second) if last == "weight" else (second, first)
        spec = Linear(out=out, into=into)
        given = [f"{n}={one!r}" for n, one in (("out", out), ("into", into)) if one is not None]
        return f"{head + '.*'!r}: Linear({', '.join(given)})"
    return f"{head + '.*'!r}: {spec if isinstance(spec, LayoutRule) else P(*spec)}"


def _missed(
    pattern: str, later: set[str], names: Sequence[str], decides: Callable[[str], str | None]
) -> Iterator[str]:
    """Of each name of another framework the first leaf that the rule would decide for."""
    head, _, last = pattern.rpartition(".")
    for twin in () if pattern.startswith("re:") else _TWINS.get(last, ()):
        for name in names:
            if name.endswith(f".{twin}") and matches(f"{head}.{twin}", name):
                by = decides(name)
                if by in (None, BY_DEFAULT) or (by in later and by.rpartition(".")[2] != twin):
                    yield name
                    break


def _laid_out(by: str | None) -> str:
    return "has no rule" if by is None else f"is laid out by {by!r}"
