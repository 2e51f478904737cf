"""Activation rules: the shardings of a module's inputs and output, by the module's name.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("dp", "tp"))
>>> plan = Plan(activations={
...     "layers.*.mlp": P("dp", None, "tp"),               # one spec: the module's output
...     "layers.*.attn": Activation(input=P("dp"), output={"0": P("dp")}),
... })
>>> activation = plan.activation_for("layers.3.mlp")
>>> activation.says("output"), activation.says("input"), plan.activation_for("layers.3")
(True, False, None)
>>> activation.resolve("output", {"": (8, 16, 64)}, mesh)[""].spec
P('dp', None, 'tp')

A bridge looks a module up once, and resolves when it has the values, traced or not. Arrays are
named by path: "" for a single array, "0", "1" in a tuple (for inputs: positions and keywords), keys
in a dictionary. A single spec applies to the first array; a mapping of paths to specs to those it
names; the other arrays are left to the compiler. `P.UNCONSTRAINED` leaves one axis to it, `...` all
axes that are not named:

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
from .freezing import UNSET, Pairs, Unset, frozen, frozen_pairs
from .layout_rules import LayoutRule, PlanError
from .logical import AxisTable
from .merging import merged
from .rule_patterns import check_patterns, label, matches

Side = Literal["input", "output"]


@dataclasses.dataclass(frozen=True, repr=False)
class Activation:
    """The shardings of a module's inputs and of its output.

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

    output: Any = UNSET
    input: Any = UNSET

    def __post_init__(self) -> None:
        """Freeze the specs, and check that at least one is set."""
        for side in ("output", "input"):
            object.__setattr__(self, side, _frozen_side(getattr(self, side)))
        if self.output is UNSET and self.input is UNSET:
            raise PlanError("an Activation needs a spec for the output or for the input")

    def __repr__(self) -> str:
        """The constructor's call."""
        fields = [
            f"{side}={dict(spec) if isinstance(spec, Pairs) else spec!r}"
            for side in ("output", "input")
            if (spec := getattr(self, side)) is not UNSET
        ]
        return f"Activation({', '.join(fields)})"


@dataclasses.dataclass(frozen=True)
class ModuleActivations:
    """A plan's rules for the inputs and the output of one module; hashable.

    Attributes:
        module: its name.
        parts: for each factor of the plan with a rule for it: the pattern, the rule, and the table
            of logical axes.
    """

    module: str
    parts: tuple[tuple[str, Activation, AxisTable], ...]

    @property
    def rule(self) -> str:
        """The patterns that decided, for tables and messages."""
        return " * ".join(label(pattern) for pattern, *_ in self.parts)

    def says(self, side: Side) -> bool:
        """Whether there is a spec for the inputs, or for the output."""
        return any(getattr(activation, side) is not UNSET for _, activation, _ in self.parts)

    def text(self, side: Side) -> str:
        """The specs as the plan spells them, for tables."""
        specs = [getattr(activation, side) for _, activation, _ in self.parts]
        return " * ".join(
            repr(dict(spec) if isinstance(spec, Pairs) else spec)
            for spec in specs
            if spec is not UNSET
        )

    def resolve(
        self, side: Side, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
    ) -> dict[str, NamedSharding]:
        """Look up the shardings of the inputs or of the output.

        Args:
            side: "input" or "output".
            shapes: global shapes of all arrays by path, in order: "" for a lone output.
            mesh: the mesh, or what `as_mesh` takes.

        Returns:
            The shardings of the arrays that have a spec, by path, for `constrain` of
            `axis_types.py`. One with unconstrained axes (`P.UNCONSTRAINED`) is over the same grid
            with Auto axes, so that the compiler can choose.

        Raises:
            PlanError: listing every array whose spec does not fit, and every missing path.
        """
        mesh = as_mesh(mesh, abstract=True)
        errors: list[str] = []
        specs_by_path: dict[str, list[P]] = {}
        for pattern, activation, table in self.parts:
            for path, spec in _spec_by_path(
                getattr(activation, side), shapes, errors, label(pattern)
            ):
                try:
                    fitted = table.fit_open(spec, shapes[path], mesh, self._label(side, path))
                except ShardingError as error:
                    errors.append(f"{error} [rule {label(pattern)!r}]")
                    continue
                specs_by_path.setdefault(path, []).append(fitted)
        result = {}
        for path, specs in specs_by_path.items():
            name, shape = self._label(side, path), shapes[path]
            try:
                spec = merged(specs, len(shape), name)
                check_even(_closed(spec), mesh, shape, name=name)
            except ShardingError as error:
                errors.append(f"{error} [rule {self.rule!r}]")
                continue
            is_open = P.UNCONSTRAINED in entries_of(spec)
            result[path] = NamedSharding(auto(mesh) if is_open else mesh, spec)
        if errors:
            raise PlanError(
                "\n  ".join([f"the {side} of module {self.module!r} cannot be sharded:", *errors])
            )
        return result

    def _label(self, side: Side, path: str) -> str:
        return f"{self.module}, {side} {path}".rstrip()


def activation_rules(rules: Any) -> tuple[tuple[str, Activation], ...]:
    """Freeze the activations of a plan.

    Args:
        rules: a mapping, or pairs, of pattern and `Activation`, spec or mapping of paths and specs
            (of the output).

    Returns:
        Pairs of pattern and `Activation`.

    Raises:
        PlanError: a pattern is malformed or given twice.

    Example:
        >>> activation_rules({"mlp": P("x")})
        (('mlp', Activation(output=P('x',))),)
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    check_patterns(pattern for pattern, _ in pairs)
    return tuple(
        (pattern, spec if isinstance(spec, Activation) else Activation(output=spec))
        for pattern, spec in pairs
    )


def activation_for(
    module: str, factors: Iterable[tuple[tuple[tuple[str, Activation], ...], AxisTable]]
) -> ModuleActivations | None:
    """The first rule that matches a module in each factor of a plan; None if no pattern matches."""
    matching = []
    for rules, table in factors:
        match = next(((p, match) for p, match in rules if matches(p, module)), None)
        if match is not None:
            matching.append((*match, table))
    return ModuleActivations(module, tuple(matching)) if matching else None


def _frozen_side(side: Any) -> Any:
    if isinstance(side, Unset | Pairs):
        return side
    specs = side.values() if isinstance(side, Mapping) else [side]
    rules = [spec for spec in specs if isinstance(spec, LayoutRule)]
    if rules:
        raise PlanError(
            f"{rules[0]!r} is a rule for parameters; give an activation a spec, such as "
            "P('dp', None, 'tp')"
        )
    if isinstance(side, Mapping):
        return frozen_pairs(side)
    return frozen(side)


def _spec_by_path(
    side: Any, shapes: Mapping[str, tuple[int, ...]], errors: list[str], rule: str
) -> list[tuple[str, Any]]:
    """Pairs of path and spec of the arrays that have one."""
    if side is UNSET:
        return []
    if not isinstance(side, Pairs):
        if not shapes:
            errors.append(f"there is no array to shard as {side!r} [rule {rule!r}]")
        return [(path, side) for path in list(shapes)[:1]]
    missing = [path for path, _ in side if path not in shapes]
    if missing:
        errors.append(
            f"there is no array at {', '.join(map(repr, missing))}; the arrays are at "
            f"{', '.join(map(repr, shapes)) or 'no path'} [rule {rule!r}]"
        )
    return [(path, spec) for path, spec in side if path in shapes]


def _closed(spec: P) -> P:
    return P(*(None if entry is P.UNCONSTRAINED else entry for entry in spec))
