"""Activations: what a plan says of the values around a module, by the module's name.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("dp", "tp"))
>>> plan = Plan(activations={
...     "layers.*.mlp": P("dp", None, "tp"),               # one spec: the module's output
...     "layers.*.attn": Activation(input=P("dp"), output={"0": P("dp")}),
... })
>>> said = plan.activation_for("layers.3.mlp")
>>> said.says("output"), said.says("input"), plan.activation_for("layers.3")
(True, False, None)
>>> said.resolve("output", {"": (8, 16, 64)}, mesh)[""].spec
P('dp', None, 'tp')

A bridge asks once per module, and resolves when it sees the values, traced or not. Arrays go by
their paths: "" for a lone one, "0", "1" in a tuple (for inputs: positions and keywords), keys in a
dictionary. A spec given alone is for the first array; a mapping of paths and specs is for those it
names; the others are left to the compiler. `P.UNCONSTRAINED` leaves one axis to it, `...` all
those that are not named:

>>> plan = Plan(activations={"norm": (P.UNCONSTRAINED, "tp", ...)})
>>> plan.activation_for("norm").resolve("output", {"0": (8, 16, 64), "1": (8,)}, mesh)["0"].spec
P(UNCONSTRAINED, 'tp', UNCONSTRAINED)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import check_even
from isoshard.core.layout.spec_entries import entries_of

from ..errors import ShardingError
from .freezing import UNSAID, Pairs, Unsaid, frozen, frozen_pairs
from .layout_rules import LayoutRule, PlanError
from .logical import AxisTable
from .merging import merged
from .rule_patterns import check_patterns, label, matches

Side = Literal["input", "output"]


@dataclasses.dataclass(frozen=True, repr=False)
class Activation:
    """The layouts of what goes into a module, and of what comes out.

    Args:
        output: a spec for the output (of several arrays, for the first), or a mapping of paths and
            specs; None replicates. Not given: the compiler decides.
        input: the same for the arguments: a spec for the first array among them, or a mapping of
            positions ("0"), keywords and paths below them ("kwargs_name.0").

    Raises:
        PlanError: neither is given, or a spec is a rule for parameters.

    Example:
        >>> Activation(input=("dp", None), output={"0": P("dp")})
        Activation(output={'0': P('dp',)}, input=('dp', None))
    """

    output: Any = UNSAID
    input: Any = UNSAID

    def __post_init__(self) -> None:
        """Freeze the specs, and check that something is said."""
        for side in ("output", "input"):
            object.__setattr__(self, side, _frozen_side(getattr(self, side)))
        if self.output is UNSAID and self.input is UNSAID:
            raise PlanError("an Activation says something of the output or of the input")

    def __repr__(self) -> str:
        """The constructor's call."""
        parts = [
            f"{side}={dict(said) if isinstance(said, Pairs) else said!r}"
            for side in ("output", "input")
            if (said := getattr(self, side)) is not UNSAID
        ]
        return f"Activation({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class ModuleActivations:
    """What a plan says of the values around one module; hashable.

    Attributes:
        module: its name.
        parts: for each factor of the plan that speaks of it: the pattern, what it says, and the
            table of logical axes.
    """

    module: str
    parts: tuple[tuple[str, Activation, AxisTable], ...]

    @property
    def rule(self) -> str:
        """The patterns that decided, for tables and messages."""
        return " * ".join(label(pattern) for pattern, *_ in self.parts)

    def says(self, side: Side) -> bool:
        """Whether there is anything to do for the inputs, or for the output."""
        return any(getattr(said, side) is not UNSAID for _, said, _ in self.parts)

    def text(self, side: Side) -> str:
        """What is asked for, as the plan has it, for tables."""
        asked = [getattr(said, side) for _, said, _ in self.parts]
        return " * ".join(
            repr(dict(one) if isinstance(one, Pairs) else one) for one in asked if one is not UNSAID
        )

    def resolve(
        self, side: Side, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
    ) -> dict[str, NamedSharding]:
        """Look up the layouts of the arrays that go in or come out.

        Args:
            side: "input" or "output".
            shapes: global shapes of all arrays by path, in order: "" for a lone output.
            mesh: the mesh, or what `as_mesh` takes.

        Returns:
            The layouts of the arrays that the plan speaks of, by path, for `constrain` of
            `axis_types.py`. Where one leaves axes open (`P.UNCONSTRAINED`) it is over the same
            grid with Auto axes, along which the compiler can choose.

        Raises:
            PlanError: listing every array whose spec does not fit, and every path that is not
                there.
        """
        mesh = as_mesh(mesh, abstract=True)
        faults: list[str] = []
        found: dict[str, list[P]] = {}
        for pattern, said, table in self.parts:
            for path, spec in _asked(getattr(said, side), shapes, faults, label(pattern)):
                try:
                    fitted = table.fit_open(spec, shapes[path], mesh, self._called(side, path))
                except ShardingError as error:
                    faults.append(f"{error} [rule {label(pattern)!r}]")
                    continue
                found.setdefault(path, []).append(fitted)
        result = {}
        for path, specs in found.items():
            name, shape = self._called(side, path), shapes[path]
            try:
                spec = merged(specs, len(shape), name)
                check_even(_closed(spec), mesh, shape, name=name)
            except ShardingError as error:
                faults.append(f"{error} [rule {self.rule!r}]")
                continue
            is_open = P.UNCONSTRAINED in entries_of(spec)
            result[path] = NamedSharding(auto(mesh) if is_open else mesh, spec)
        if faults:
            raise PlanError(
                "\n  ".join([f"the {side} of module {self.module!r} cannot be laid out:", *faults])
            )
        return result

    def _called(self, side: Side, path: str) -> str:
        return f"{self.module}, {side} {path}".rstrip()


def activation_rules(given: Any) -> tuple[tuple[str, Activation], ...]:
    """Freeze the activations of a plan.

    Args:
        given: a mapping, or pairs, of pattern and `Activation`, spec or mapping of paths and specs
            (of the output).

    Returns:
        Pairs of pattern and `Activation`.

    Raises:
        PlanError: a pattern is malformed or given twice.

    Example:
        >>> activation_rules({"mlp": P("x")})
        (('mlp', Activation(output=P('x',))),)
    """
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    check_patterns(pattern for pattern, _ in pairs)
    return tuple(
        (pattern, said if isinstance(said, Activation) else Activation(output=said))
        for pattern, said in pairs
    )


def activation_for(
    module: str, parts: Iterable[tuple[tuple[tuple[str, Activation], ...], AxisTable]]
) -> ModuleActivations | None:
    """Find what the factors of a plan say of one module: in each, the first pattern that matches.

    Args:
        module: its name.
        parts: the rules and the table of each factor.

    Returns:
        What they say, or None if no pattern matches.
    """
    found = []
    for rules, table in parts:
        said = next(((p, said) for p, said in rules if matches(p, module)), None)
        if said is not None:
            found.append((*said, table))
    return ModuleActivations(module, tuple(found)) if found else None


def _frozen_side(said: Any) -> Any:
    if isinstance(said, Unsaid | Pairs):
        return said
    specs = said.values() if isinstance(said, Mapping) else [said]
    rules = [spec for spec in specs if isinstance(spec, LayoutRule)]
    if rules:
        raise PlanError(
            f"{rules[0]!r} is a rule for parameters; give an activation a spec, such as "
            "P('dp', None, 'tp')"
        )
    if isinstance(said, Mapping):
        return frozen_pairs(said)
    return frozen(said)


def _asked(
    said: Any, shapes: Mapping[str, tuple[int, ...]], faults: list[str], rule: str
) -> list[tuple[str, Any]]:
    """The arrays spoken of, each with its spec."""
    if said is UNSAID:
        return []
    if not isinstance(said, Pairs):
        if not shapes:
            faults.append(f"there is no array to lay out as {said!r} [rule {rule!r}]")
        return [(path, said) for path in list(shapes)[:1]]
    missing = [path for path, _ in said if path not in shapes]
    if missing:
        faults.append(
            f"there is no array at {', '.join(map(repr, missing))}; the arrays are at "
            f"{', '.join(map(repr, shapes)) or 'no path'} [rule {rule!r}]"
        )
    return [(path, spec) for path, spec in said if path in shapes]


def _closed(spec: P) -> P:
    return P(*(None if entry is P.UNCONSTRAINED else entry for entry in spec))
