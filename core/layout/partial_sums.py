"""Partial sums: the unreduced axes of a sharding, and the reduced ones.

Over an unreduced mesh axis every device has a term, and the value is the sum of the terms. Over a
reduced axis every device has the value, and its gradient is unreduced. JAX has both in types, over
Explicit axes; DTensor calls the first `Partial`. From JAX 0.12 on the terms may be those of a
maximum or a minimum as well.

>>> mesh = jax.make_mesh((2, 4), ("x", "y"))
>>> terms = NamedSharding(mesh, P("x", unreduced={"y"}))
>>> unreduced(terms), stored(terms).spec
(('y',), P('x',))
>>> x = jax.device_put(jax.numpy.arange(2.0), stored(terms))
>>> partial = resharded(x, terms)
>>> jax.typeof(partial), jax.typeof(resharded(partial, NamedSharding(mesh, P())))
(ShapedArray(float32[2@x]{U:y}), ShapedArray(float32[2]))

Data from the host, OpSharding strings, `Tiles`, torch tensors and files have no terms. There
`check_no_sums` raises, with how to fix it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, SpecError, UnrepresentableError
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .spec_entries import entries_of


def unreduced(layout: Any) -> tuple[str, ...]:
    """The unreduced mesh axes of a sharding or a PartitionSpec, sorted; of other kinds, none."""
    return _axes(layout, "unreduced")


def reduced(layout: Any) -> tuple[str, ...]:
    """The reduced mesh axes, over which the gradient is unreduced, sorted; as `unreduced`."""
    return _axes(layout, "reduced")


def reduction(layout: Any) -> str:
    """The reduction of a sharding's or spec's terms: "sum", from JAX 0.12 on also "max", "min"."""
    kind = getattr(getattr(layout, "spec", layout), "unreduced_kind", None)
    return "sum" if kind is None else kind.name


def open_spec(
    entries: Iterable[Any],
    unreduced: Iterable[str],
    by: str = "sum",
    reduced: Iterable[str] = (),
) -> P:
    """A PartitionSpec with unreduced and reduced axes.

    Args:
        entries: of the stored blocks, one per array axis.
        unreduced: mesh axes.
        by: "sum", "max" or "min".
        reduced: mesh axes over which gradients are unreduced.

    Raises:
        UnrepresentableError: JAX has no such reduction; before 0.12 it has sums only.

    Example:
        >>> reduction(open_spec(["x"], ["y"]))
        'sum'
    """
    axes: dict[str, Any] = {"unreduced": frozenset(unreduced), "reduced": frozenset(reduced)}
    if by == "sum":
        return P(*entries, **axes)
    kinds = getattr(jax.sharding, "UnreducedKind", None)
    if not hasattr(kinds, by):
        raise UnrepresentableError(
            f"the {by} over mesh axes {', '.join(sorted(axes['unreduced']))} is unreduced, "
            f"and JAX {jax.__version__} has sums only (maxima and minima from 0.12 on). Reduce it "
            "first."
        )
    axes["unreduced_kind"] = getattr(kinds, by)
    return P(*entries, **axes)


def _terms(layout: Any) -> tuple[tuple[str, ...], str]:
    return unreduced(layout), reduction(layout)


def same_terms(layout: Any, other: Any) -> bool:
    """Whether two shardings or specs have the same unreduced axes and reduction."""
    return _terms(layout) == _terms(other)


def stored(sharding: Any) -> Any:
    """The sharding of the stored blocks, without unreduced and reduced axes."""
    if not (unreduced(sharding) or reduced(sharding)):
        return sharding
    spec = P(*entries_of(sharding.spec))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def with_sums(sharding: NamedSharding, spec_with_sums: Any, name: str) -> NamedSharding:
    """A sharding with the unreduced and reduced axes of a spec.

    Args:
        sharding: of the stored blocks.
        spec_with_sums: the PartitionSpec or NamedSharding that has these axes.
        name: of the tensor, for messages.

    Raises:
        SpecError: an axis is none of the mesh, or is not Explicit.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> ours = NamedSharding(make_mesh((8,), ("x",)), P())
        >>> with_sums(ours, P(unreduced={"x"}), "bias")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.SpecError: bias: sums over mesh axis 'x' (Auto): JAX has them over Explicit axes only. Make the mesh with jax.make_mesh, or with axis_types=AxisType.Explicit.
    """  # noqa: E501
    mesh = sharding.mesh
    kinds = {n: k.name for n, k in zip(mesh.axis_names, mesh.axis_types, strict=True)}
    names = (*unreduced(spec_with_sums), *reduced(spec_with_sums))
    wrong = [
        f"{n!r} ({kinds.get(n, 'not on the mesh')})" for n in names if kinds.get(n) != "Explicit"
    ]
    if wrong:
        raise SpecError(
            f"{name}: sums over mesh axis {', '.join(wrong)}: JAX has them over Explicit axes "
            "only. Make the mesh with jax.make_mesh, or with axis_types=AxisType.Explicit."
        )
    sums = unreduced(spec_with_sums), reduction(spec_with_sums), reduced(spec_with_sums)
    spec = open_spec(entries_of(sharding.spec), *sums)
    return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def resharded(x: jax.Array, sharding: Any) -> jax.Array:
    """Reduce sums, split into terms, or reshard terms; by JAX's own `reshard`.

    Args:
        x: on the mesh of `sharding`, or traced over that mesh.
        sharding: a NamedSharding over a mesh whose axes are all Explicit.

    Raises:
        ShardingError: some axis of the mesh is not Explicit.
    """
    if not sharding.mesh.are_all_axes_explicit:
        raise ShardingError(
            f"{sharding.spec} over a mesh of axis types {sharding.mesh.axis_types}: JAX "
            "supports unreduced axes only where all axes are Explicit. Shard the operands over a "
            "mesh of jax.make_mesh."
        )
    have = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
    if isinstance(x, Tracer):  # JAX raises for an explicit default memory kind of a traced value
        kind = None if sharding.memory_kind == "device" else sharding.memory_kind
        sharding = NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind)
    if unreduced(have) and unreduced(sharding) and not same_terms(have, sharding):
        x = jax.sharding.reshard(x, stored(sharding))  # from terms to other terms XLA aborts
    return jax.sharding.reshard(x, sharding)


_TAKE = "Reduce them first: iso.full(x), or iso.reshard(x, spec) with a spec without unreduced=."


def check_no_sums(layout: Any, subject: str, fix: str = _TAKE, *, name: str = "") -> None:
    """Raise UnrepresentableError for a sharding or spec with unreduced axes.

    Args:
        layout: a sharding or a PartitionSpec.
        subject: a clause on what has no terms, for the message.
        fix: how to fix it, for the message.
        name: of the tensor, for the message.
    """
    if names := unreduced(layout):
        spec = layout.spec if isinstance(layout, NamedSharding) else layout
        raise UnrepresentableError(
            f"{name and f'{name}: '}{spec} is unreduced over mesh axis "
            f"{', '.join(map(repr, names))}, and {subject}. {fix}"
        )


def _axes(layout: Any, kind: str) -> tuple[str, ...]:
    spec = getattr(layout, "spec", layout)
    return tuple(sorted(getattr(spec, kind, ()))) if isinstance(spec, P) else ()
