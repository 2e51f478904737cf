"""Warnings of rules that decide nothing, with the leaves that may have been meant.

>>> from isoshard.core.plan import Plan
>>> print("\\n".join(unused_rules(Plan({"wieght": P("x"), "*.bias": P("x")}), ["weight", "bias"])))
'wieght': no leaf is called so; the nearest is 'weight'
'*.bias': no leaf is called so, as nothing stands before its dot; '*bias' takes 'bias'

A rule behind one that matches all of its leaves decides nothing either; one that replicates leaves
and matches none is harmless:

>>> unused_rules(Plan({"*": None, "bias": P("x")}), ["bias"])
["'bias': an earlier rule, '*', is wider; put it first"]
>>> unused_rules(Plan({"*.qkv.bias": P("x"), "*.bias": P("x")}), ["0.qkv.bias"])
[]
>>> unused_rules(Plan({"*norm*": None, "*": P("x")}), ["bias"])
[]

A rule for another framework's name of a leaf, or for a missing bias, is no error where another
decides for the same layer:

>>> unused_rules(Plan({"*up.kernel": P(None, "x"), "*up.weight": P("x")}), ["0.up.kernel"])
[]

Nor is one for another model, where others split this one. A near miss of a leaf's name is reported:

>>> unused_rules(Plan({"*up.*": P("x"), "*down.*": P("x"), "*": None}), ["0.up.weight"])
[]
>>> unused_rules(Plan({"*up.*": P("x"), "*dwn.bias": P("x")}), ["0.up.bias", "0.down.bias"])
["'*dwn.bias': no leaf is called so; the nearest is '0.down.bias'"]

A rule behind a wider one splits nothing, so it does not excuse the others:

>>> len(unused_rules(Plan({"b*": None, "bias": P("x"), "v": P("x")}), ["bias", "w"]))
2

Presets match many names, of which a model has some; one that matches none of them is reported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import AnyMesh
from isoshard.core.layout.mesh import describe_mesh
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.runtime.user_warnings import warn_user

from ..errors import CodedWarning
from .freezing import Pairs
from .hf_plan import HfStyle
from .layout_rules import PlanError
from .model_leaves import names_in
from .rule_patterns import deciding_rule, label, matches, slot_rules

if TYPE_CHECKING:
    from .plan import Plan

_SHOWN = 3
_SEARCHED = 2000  # names that difflib compares: it is quadratic
# difflib's ratios: "dwn" and "down" have 0.86, "wieght" and "weight" 0.83; unrelated names less
# than 0.5. The strict one is for rules that may be for another model.
_CUTOFF, _STRICT_CUTOFF = 0.5, 0.8
_LAYER_LEAF = re.compile(r"(.*?)(weight|kernel|bias|embedding|scale)")


class UnusedRuleWarning(CodedWarning, code="ISO013"):
    """A plan's rules decide nothing on a model: misspelt, behind others, or for another model.

    Example:
        >>> import warnings, numpy as np
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.plan import Plan
        >>> from isoshard.core.transfer.device_put import shard
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", UnusedRuleWarning)
        ...     shard({"w": np.ones(8)}, make_mesh((8,), ("x",)), Plan({"v": P("x"), "*": None}))
        Traceback (most recent call last):
            ...
        isoshard.core.plan.unused_rules.UnusedRuleWarning: the plan has rules that decide nothing here:
          'v': no leaf is called so; the leaves are 'w'
        Correct them or take them out; print(plan.resolve(model, mesh)) shows what decides each leaf. [ISO013]
    """  # noqa: E501


def warn_unused(plan: Any, *trees: Any, slots: Sequence[str] = ()) -> None:
    """Warn of the rules of a plan that decide for no leaf.

    Args:
        plan: a Plan; anything else, such as a spec, has no rules.
        *trees: the modules or pytrees that it shards, together. A single array is looked up by a
            name that it need not have, so it is skipped.
        slots: names of the slots of an optimizer; see `slot_rules`.
    """
    names: list[str] = []
    for tree in trees if hasattr(plan, "factors") else ():
        more = names_in(tree)
        if more is None:
            return
        names += more
    lines = unused_rules(plan, names, slots) if names else []
    if lines:
        listed = "".join(f"\n  {line}" for line in lines)
        warn_user(
            f"the plan has rules that decide nothing here:{listed}\nCorrect them or take them out; "
            "print(plan.resolve(model, mesh)) shows what decides each leaf.",
            UnusedRuleWarning,
        )


def warn_unused_activations(plan: Plan, modules: Sequence[str]) -> None:
    """Warn of the rules for activations that match no module of a model.

    One for a missing module is harmless, as the plan may be for several models; a near miss of a
    module's name, and a rule behind a wider one, are reported.

    Example:
        >>> import warnings
        >>> from isoshard.core.plan import Plan
        >>> with warnings.catch_warnings(record=True) as heard:
        ...     warnings.simplefilter("always")
        ...     plan = Plan(activations={"up": P("x"), "dwn": P("x")})
        ...     warn_unused_activations(plan, ["up", "down"])
        >>> print(str(heard[0].message).splitlines()[1])
          'dwn': no module is called so; the nearest is 'down'
    """
    deciding = {
        name: activation.rule for name in modules if (activation := plan.activation_for(name))
    }
    deciding = {name: deciding.get(name) for name in modules}
    lines = []
    for factor in plan.factors:
        for pattern, _ in factor.activations:
            if pattern not in deciding.values() and label(pattern) == pattern:
                message = _reason(pattern, False, modules, deciding, "module")
                lines += [] if message is None else [f"\n  {pattern!r}: {message}"]
    if lines:
        warn_user(
            f"the plan has rules for activations that decide nothing here:{''.join(lines)}\n"
            "Correct them or take them out.",
            UnusedRuleWarning,
        )


def unused_rules(plan: Plan, names: Sequence[str], slots: Sequence[str] = ()) -> list[str]:
    """The rules of a plan that decide for no leaf and no slot, each with a likely reason."""
    decided = [_deciding(factor, names, slots) for factor in plan.factors]
    names = [*names, *slots]
    is_unsplit = not any(
        any(names_of_axes(spec)) and pattern in deciding.values()
        for factor, deciding in zip(plan.factors, decided, strict=True)
        for pattern, spec in factor.rules
    )
    messages = []
    for factor, deciding in zip(plan.factors, decided, strict=True):
        patterns = [pattern for pattern, _ in factor.rules]
        used = {pattern for pattern in deciding.values() if pattern is not None}
        unused = [rule for rule in factor.rules if rule[0] not in used]
        preset = [pattern for pattern, spec in unused if _is_preset(pattern, spec)]
        for pattern, spec in unused:
            if pattern not in preset and not _is_for_others(pattern, used, names):
                message = _reason(pattern, any(names_of_axes(spec)) and is_unsplit, names, deciding)
                messages += [] if message is None else [f"{pattern!r}: {message}"]
        if preset and preset == patterns:
            labels = ", ".join(map(label, preset[:_SHOWN]))
            messages.append(f"{labels}: these match no leaf by its name; {_leaves(names)}")
    return messages


def _deciding(factor: Plan, names: Sequence[str], slots: Sequence[str]) -> dict[str, str | None]:
    """The pattern that decides for each leaf and each slot, or None."""
    rules = slot_rules(factor, names) if slots else []
    return {name: _pattern(deciding_rule(factor.rules, name)) for name in names} | {
        name: _pattern(deciding_rule(rules, name)) for name in slots
    }


def _pattern(rule: tuple[str, Any] | None) -> str | None:
    return None if rule is None else rule[0]


def _is_preset(pattern: str, spec: Any) -> bool:
    """Whether a rule is a preset, for names that many models have and not every model needs."""
    return label(pattern) != pattern or isinstance(spec, HfStyle)


def _is_for_others(pattern: str, used: Collection[str], names: Sequence[str]) -> bool:
    """Whether a rule is for another framework's name of a leaf, or a bias that a layer lacks.

    That is so if another rule decides for the same layer, or no leaf of the model has that name.
    """
    match = _LAYER_LEAF.fullmatch(pattern)
    others = [other for other in map(_LAYER_LEAF.fullmatch, used) if other is not None]
    if match is None or not others:
        return False
    return any(other[1] == match[1] for other in others) or not any(
        name.endswith(match[2]) for name in names
    )


def _reason(
    pattern: str,
    is_unsplit: bool,
    names: Sequence[str],
    deciding: dict[str, str | None],
    kind: str = "leaf",
) -> str | None:
    """Why a rule decides nothing; None if that is harmless.

    A rule for missing leaves is harmless if it replicates, or if other rules split some leaves: the
    plan may be for several models. A near miss of a leaf's name is always reported.
    """
    before = {deciding[name] for name in names if matches(pattern, name)} - {None}
    if before:
        wider = [
            repr(label(other)) for other in before if other is not None and matches(other, pattern)
        ]
        return f"an earlier rule, {', '.join(wider)}, is wider; put it first" if wider else None
    wider = f"*{pattern[2:]}" if pattern.startswith("*.") else pattern
    meant = next((name for name in names if matches(wider, name)), None)
    if meant is not None:
        return (
            f"no {kind} is called so, as nothing stands before its dot; {wider!r} takes {meant!r}"
        )
    text = re.sub(r"[^\w.]", "", pattern.removeprefix("re:"))
    cutoff = _CUTOFF if is_unsplit else _STRICT_CUTOFF
    near = difflib.get_close_matches(text, names[:_SEARCHED], _SHOWN, cutoff)
    if not near:
        return f"no {kind} is called so; {_leaves(names)}" if is_unsplit else None
    verb = "is" if len(near) == 1 else "are"
    return f"no {kind} is called so; the nearest {verb} {', '.join(map(repr, near))}"


def _leaves(names: Sequence[str]) -> str:
    more = ", .." if len(names) > _SHOWN else ""
    return f"the leaves are {', '.join(map(repr, names[:_SHOWN]))}{more}"


def unknown_axes(pattern: str, spec: Any, logical: Sequence[str], mesh: AnyMesh) -> str | None:
    """The message for an unused rule whose axes are not on the mesh, or None."""
    axes = {*mesh.axis_names, *logical}
    wrong = [repr(name) for name in dict.fromkeys(names_of_axes(spec)) if name not in axes]
    if not wrong:
        return None
    return (
        f"rule {label(pattern)!r}: {spec!r} does not fit: no mesh axis is called "
        f"{', '.join(wrong)}. The mesh axes are {describe_mesh(mesh)}"
    )


def check_activation_axes(plan: Plan, mesh: AnyMesh) -> None:
    """Raise for activation rules that name axes the mesh lacks, before a module is called.

    Raises:
        PlanError: naming each rule.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.plan import Plan
        >>> check_activation_axes(Plan(activations={"*.mlp": P("x")}), make_mesh((8,), ("x",)))
    """
    wrong = []
    for factor in plan.factors:
        for pattern, activation in factor.activations:
            for side in (activation.output, activation.input):
                specs = [spec for _, spec in side] if isinstance(side, Pairs) else [side]
                wrong += [unknown_axes(pattern, spec, factor.axes.names, mesh) for spec in specs]
    lines = [message for message in wrong if message is not None]
    if lines:
        raise PlanError("\n  ".join(["activations cannot be sharded on this mesh:", *lines]))


def names_of_axes(spec: Any) -> Iterator[str]:
    """The names of axes in a spec or a rule; other spellings are checked with a leaf."""
    if isinstance(spec, str | P | tuple):
        entries = entries_of(spec) if isinstance(spec, P) else spec
        for entry in (entries,) if isinstance(entries, str) else entries:
            if isinstance(entry, str):
                yield entry
            elif isinstance(entry, tuple):
                yield from (name for name in entry if isinstance(name, str))
        return
    for field in ("out", "into", "axis"):
        axes = getattr(spec, field, None)
        if isinstance(axes, str | tuple):
            yield from names_of_axes((axes,))
