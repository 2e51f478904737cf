"""Rules that decide nothing: said by name, with the leaves that may have been meant.

>>> from isoshard.core.plan import Plan
>>> print("\\n".join(unused_rules(Plan({"wieght": P("x"), "*.bias": P("x")}), ["weight", "bias"])))
'wieght': no leaf is called so; the nearest is 'weight'
'*.bias': no leaf is called so, as nothing stands before its dot; '*bias' takes 'bias'

A rule behind one that takes all of its leaves decides nothing either; one that keeps leaves whole
and meets none does no harm:

>>> unused_rules(Plan({"*": None, "bias": P("x")}), ["bias"])
["'bias': an earlier rule, '*', is wider; put it first"]
>>> unused_rules(Plan({"*.qkv.bias": P("x"), "*.bias": P("x")}), ["0.qkv.bias"])
[]
>>> unused_rules(Plan({"*norm*": None, "*": P("x")}), ["bias"])
[]

A rule for another framework's name of a leaf, or for a bias that is not there, is no fault where
another decides for the same layer:

>>> unused_rules(Plan({"*up.kernel": P(None, "x"), "*up.weight": P("x")}), ["0.up.kernel"])
[]

Nor is one for another model, where others split this one. A name that is almost a leaf's is told:

>>> unused_rules(Plan({"*up.*": P("x"), "*down.*": P("x"), "*": None}), ["0.up.weight"])
[]
>>> unused_rules(Plan({"*up.*": P("x"), "*dwn.bias": P("x")}), ["0.up.bias", "0.down.bias"])
["'*dwn.bias': no leaf is called so; the nearest is '0.down.bias'"]

A rule behind a wider one splits nothing, so it does not speak for the others:

>>> len(unused_rules(Plan({"b*": None, "bias": P("x"), "v": P("x")}), ["bias", "w"]))
2

Ready-made plans know many names, of which a model has some; one that knows none of them is told.
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
from .rule_patterns import label, matches
from .slot_names import deciding_rule, slot_rules

if TYPE_CHECKING:
    from .plan import Plan

_SHOWN = 3
_SEARCHED = 2000
_LIKE, _ALMOST = 0.5, 0.8
_OF_A_LAYER = re.compile(r"(.*?)(weight|kernel|bias|embedding|scale)")


class UnusedRuleWarning(CodedWarning, code="ISO013"):
    """A plan's rules decide nothing on a model: misspelt, behind others, or for another model.

    Example:
        >>> import warnings, numpy as np
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.plan import Plan
        >>> from isoshard.core.transfer.place import shard
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
        *trees: what is laid out by it, together: modules, or pytrees. A lone array is looked up by
            a name that it need not have, so it is passed over.
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
    """Warn of the rules for activations that lay out nothing of a model, of whose modules some are.

    One for a module that is not there does no harm, as the plan may be for several models; a name
    that is almost a module's, and a rule behind a wider one, are told.

    Args:
        plan: the plan.
        modules: the names of the modules.

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
    deciding = {name: said.rule for name in modules if (said := plan.activation_for(name))}
    deciding = {name: deciding.get(name) for name in modules}
    lines = []
    for factor in plan.factors:
        for pattern, _ in factor.activations:
            if pattern not in deciding.values() and label(pattern) == pattern:
                fault = _fault(pattern, False, modules, deciding, "module")
                lines += [] if fault is None else [f"\n  {pattern!r}: {fault}"]
    if lines:
        warn_user(
            f"the plan has rules for activations that decide nothing here:{''.join(lines)}\n"
            "Correct them or take them out.",
            UnusedRuleWarning,
        )


def unused_rules(plan: Plan, names: Sequence[str], slots: Sequence[str] = ()) -> list[str]:
    """The rules of a plan that decide for none of some leaves, each with what may be wrong.

    Args:
        plan: the plan.
        names: of the leaves.
        slots: names of the slots of an optimizer.
    """
    decided = [_deciding(factor, names, slots) for factor in plan.factors]
    names = [*names, *slots]
    alone = not any(
        any(names_of_axes(spec)) and pattern in deciding.values()
        for factor, deciding in zip(plan.factors, decided, strict=True)
        for pattern, spec in factor.rules
    )
    found = []
    for factor, deciding in zip(plan.factors, decided, strict=True):
        patterns = [pattern for pattern, _ in factor.rules]
        used = {pattern for pattern in deciding.values() if pattern is not None}
        unused = [rule for rule in factor.rules if rule[0] not in used]
        ready_made = [pattern for pattern, spec in unused if _is_ready_made(pattern, spec)]
        for pattern, spec in unused:
            if pattern not in ready_made and not _is_for_others(pattern, used, names):
                fault = _fault(pattern, any(names_of_axes(spec)) and alone, names, deciding)
                found += [] if fault is None else [f"{pattern!r}: {fault}"]
        if ready_made and ready_made == patterns:
            labels = ", ".join(map(label, ready_made[:_SHOWN]))
            found.append(f"{labels}: these know no leaf by its name; {_leaves(names)}")
    return found


def _deciding(factor: Plan, names: Sequence[str], slots: Sequence[str]) -> dict[str, str | None]:
    """Which pattern decides for each leaf and each slot; None if none does."""
    own = slot_rules(factor, names) if slots else []
    return {name: _pattern(deciding_rule(factor.rules, name)) for name in names} | {
        name: _pattern(deciding_rule(own, name)) for name in slots
    }


def _pattern(rule: tuple[str, Any] | None) -> str | None:
    return None if rule is None else rule[0]


def _is_ready_made(pattern: str, spec: Any) -> bool:
    """Whether a rule knows names that many models have, and any one need not."""
    return label(pattern) != pattern or isinstance(spec, HfStyle)


def _is_for_others(pattern: str, used: Collection[str], names: Sequence[str]) -> bool:
    """Whether a rule is for another framework's name of a leaf, or a bias that a layer lacks.

    So it is where another rule decides for the same layer, or no leaf of the model is called so.
    """
    own = _OF_A_LAYER.fullmatch(pattern)
    others = [found for found in map(_OF_A_LAYER.fullmatch, used) if found is not None]
    if own is None or not others:
        return False
    return any(found[1] == own[1] for found in others) or not any(
        name.endswith(own[2]) for name in names
    )


def _fault(
    pattern: str,
    alone: bool,
    names: Sequence[str],
    deciding: dict[str, str | None],
    kind: str = "leaf",
) -> str | None:
    """Why a rule decides nothing; None if it does no harm.

    A rule for what is not there does none where it keeps leaves whole, and where others split some:
    the plan may be for several models. A name that is almost a leaf's is told always.
    """
    before = {deciding[name] for name in names if matches(pattern, name)} - {None}
    if before:
        wider = [repr(label(one)) for one in before if one is not None and matches(one, pattern)]
        return f"an earlier rule, {', '.join(wider)}, is wider; put it first" if wider else None
    wider = f"*{pattern[2:]}" if pattern.startswith("*.") else pattern
    meant = next((name for name in names if matches(wider, name)), None)
    if meant is not None:
        return (
            f"no {kind} is called so, as nothing stands before its dot; {wider!r} takes {meant!r}"
        )
    words = re.sub(r"[^\w.]", "", pattern.removeprefix("re:"))
    like = _LIKE if alone else _ALMOST
    near = difflib.get_close_matches(words, names[:_SEARCHED], _SHOWN, like)
    if not near:
        return f"no {kind} is called so; {_leaves(names)}" if alone else None
    verb = "is" if len(near) == 1 else "are"
    return f"no {kind} is called so; the nearest {verb} {', '.join(map(repr, near))}"


def _leaves(names: Sequence[str]) -> str:
    more = ", .." if len(names) > _SHOWN else ""
    return f"the leaves are {', '.join(map(repr, names[:_SHOWN]))}{more}"


def unknown_axes(pattern: str, spec: Any, logical: Sequence[str], mesh: AnyMesh) -> str | None:
    """What is wrong with a rule that no leaf has shown to be wrong: it names no axis of the mesh.

    Args:
        pattern: of the rule.
        spec: of the rule.
        logical: the names that the plan's own table maps to the mesh.
        mesh: the mesh.

    Returns:
        The fault, or None.
    """
    known = {*mesh.axis_names, *logical}
    wrong = [repr(name) for name in dict.fromkeys(names_of_axes(spec)) if name not in known]
    if not wrong:
        return None
    return (
        f"rule {label(pattern)!r}: {spec!r} does not fit: no mesh axis is called "
        f"{', '.join(wrong)}. The mesh axes are {describe_mesh(mesh)}"
    )


def check_activation_axes(plan: Plan, mesh: AnyMesh) -> None:
    """Refuse rules for activations that name axes the mesh lacks, before a module is called.

    Args:
        plan: the plan.
        mesh: the mesh.

    Raises:
        PlanError: naming each.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.plan import Plan
        >>> check_activation_axes(Plan(activations={"*.mlp": P("x")}), make_mesh((8,), ("x",)))
    """
    wrong = []
    for factor in plan.factors:
        for pattern, said in factor.activations:
            for side in (said.output, said.input):
                specs = [spec for _, spec in side] if isinstance(side, Pairs) else [side]
                wrong += [unknown_axes(pattern, spec, factor.axes.names, mesh) for spec in specs]
    lines = [fault for fault in wrong if fault is not None]
    if lines:
        raise PlanError("\n  ".join(["activations cannot be laid out on this mesh:", *lines]))


def names_of_axes(spec: Any) -> Iterator[str]:
    """The names of axes in a spec or a rule; what has other spellings is looked at with a leaf."""
    if isinstance(spec, str | P | tuple):
        entries = entries_of(spec) if isinstance(spec, P) else spec
        for entry in (entries,) if isinstance(entries, str) else entries:
            if isinstance(entry, str):
                yield entry
            elif isinstance(entry, tuple):
                yield from (one for one in entry if isinstance(one, str))
        return
    for field in ("out", "into", "axis"):
        axes = getattr(spec, field, None)
        if isinstance(axes, str | tuple):
            yield from names_of_axes((axes,))
