"""Rules for another framework's leaves: torch's `weight[out, in]` is Flax's `kernel[in, out]`.

A rule for `*.q_proj.weight` matches nothing in a Flax model. If a later catch-all rule matches its
kernel, the model would silently get another sharding than the plan specifies. So that is an error,
with the rule that serves both frameworks. Where another rule of the plan names leaves as the model
does, the plan is meant for it as it is.

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

_EQUIVALENTS: Mapping[str, tuple[str, ...]] = {
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
    """Raise for rules that match nothing only because the model's framework names leaves otherwise.

    Args:
        rules: of one plan, in order.
        names: of all leaves.
        used: patterns that decided for some leaf.
        decides: gives the pattern of this plan that decides for a leaf, or a label of the default
            that does; None if nothing does.

    Raises:
        PlanError: naming each rule and a leaf that it misses.
    """
    used_suffixes = {pattern.rpartition(".")[2] for pattern in used}
    errors = [
        f"  {pattern!r} decides nothing, and {name} {_layout_text(decides(name))}; write "
        f"{in_both_orders(pattern, spec, name.rpartition('.')[2])}"
        for index, (pattern, spec) in enumerate(rules)
        if pattern not in used and isinstance(spec, LayoutRule | P | tuple)
        for name in _missed_leaves(
            pattern, {later for later, _ in rules[index + 1 :]}, names, decides
        )
        if name.rpartition(".")[2] not in used_suffixes
    ]
    if errors:
        raise PlanError(
            "the plan names leaves as another framework does (torch weight[out, in], Flax "
            "kernel[in, out]):\n" + "\n".join(errors)
        )


def in_both_orders(pattern: str, spec: Any, other: str) -> str:
    """The rule that gives both frameworks' leaves the same sharding."""
    head, _, last = pattern.rpartition(".")
    if "kernel" in (last, other) and not isinstance(spec, LayoutRule):
        first, second = (*spec, None, None)[:2]
        out, into = (first, second) if last == "weight" else (second, first)
        spec = Linear(out=out, into=into)
        args = [f"{n}={axes!r}" for n, axes in (("out", out), ("into", into)) if axes is not None]
        return f"{head + '.*'!r}: Linear({', '.join(args)})"
    return f"{head + '.*'!r}: {spec if isinstance(spec, LayoutRule) else P(*spec)}"


def _missed_leaves(
    pattern: str, later: set[str], names: Sequence[str], decides: Callable[[str], str | None]
) -> Iterator[str]:
    """For each of another framework's names, the first leaf that the rule would match by it."""
    head, _, last = pattern.rpartition(".")
    for equivalent in () if pattern.startswith("re:") else _EQUIVALENTS.get(last, ()):
        for name in names:
            if name.endswith(f".{equivalent}") and matches(f"{head}.{equivalent}", name):
                by = decides(name)
                if by in (None, BY_DEFAULT) or (
                    by in later and by.rpartition(".")[2] != equivalent
                ):
                    yield name
                    break


def _layout_text(rule: str | None) -> str:
    return "has no rule" if rule is None else f"is sharded by {rule!r}"
