"""Sums that are still to be taken: the unreduced axes of a layout, and the reduced ones.

Along an unreduced mesh axis every device holds a term, and the value is the sum of the terms.
Along a reduced axis every device holds the value, and its gradient is unreduced. JAX has both in
types, over Explicit axes; DTensor calls the first `Partial`. From JAX 0.12 on the terms may be
those of a maximum or a minimum as well.

>>> mesh = jax.make_mesh((2, 4), ("x", "y"))
>>> terms = NamedSharding(mesh, P("x", unreduced={"y"}))
>>> unreduced(terms), stored(terms).spec
(('y',), P('x',))
>>> x = jax.device_put(jax.numpy.arange(2.0), stored(terms))
>>> partial = resharded(x, terms)
>>> jax.typeof(partial), jax.typeof(resharded(partial, NamedSharding(mesh, P())))
(ShapedArray(float32[2@x]{U:y}), ShapedArray(float32[2]))

What says which slice of a tensor each device holds has no words for a term: data from the host, an
OpSharding string, `Tiles`, a torch tensor, a file. There `refuse` says what to do.
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
    """The mesh axes along which sums are still to be taken, sorted.

    Args:
        layout: a sharding or a PartitionSpec; of any other kind, none.
    """
    return _axes(layout, "unreduced")


def reduced(layout: Any) -> tuple[str, ...]:
    """The mesh axes along which the gradient will be unreduced, sorted; as `unreduced`."""
    return _axes(layout, "reduced")


def reduction(layout: Any) -> str:
    """What reduces the terms of a layout: "sum", and from JAX 0.12 on "max" or "min" too.

    Args:
        layout: a sharding or a PartitionSpec.
    """
    kind = getattr(getattr(layout, "spec", layout), "unreduced_kind", None)
    return "sum" if kind is None else kind.name


def open_spec(
    entries: Iterable[Any],
    unreduced: Iterable[str],
    by: str = "sum",
    reduced: Iterable[str] = (),
) -> P:
    """A PartitionSpec whose values are still to be reduced along mesh axes.

    Args:
        entries: of the stored blocks, one per array axis.
        unreduced: those mesh axes.
        by: "sum", "max" or "min".
        reduced: mesh axes along which gradients will be unreduced.

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
            f"the {by} over mesh axes {', '.join(sorted(axes['unreduced']))} is still to be taken, "
            f"and JAX {jax.__version__} has sums only (maxima and minima from 0.12 on). Reduce it "
            "first."
        )
    axes["unreduced_kind"] = getattr(kinds, by)
    return P(*entries, **axes)


def _terms(layout: Any) -> tuple[tuple[str, ...], str]:
    return unreduced(layout), reduction(layout)


def same_terms(layout: Any, other: Any) -> bool:
    """Whether two layouts leave the same axes unreduced, by the same reduction.

    Args:
        layout: a sharding or a PartitionSpec.
        other: another one.
    """
    return _terms(layout) == _terms(other)


def stored(sharding: Any) -> Any:
    """The same blocks without a word on sums: what each device holds a term, or a copy, of."""
    if not (unreduced(sharding) or reduced(sharding)):
        return sharding
    spec = P(*entries_of(sharding.spec))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def with_sums(sharding: NamedSharding, said: Any, name: str) -> NamedSharding:
    """A layout that says of sums what a spec says.

    Args:
        sharding: of the stored blocks.
        said: the PartitionSpec or NamedSharding whose sums are meant.
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
    names = (*unreduced(said), *reduced(said))
    wrong = [f"{n!r} ({kinds.get(n, 'not there')})" for n in names if kinds.get(n) != "Explicit"]
    if wrong:
        raise SpecError(
            f"{name}: sums over mesh axis {', '.join(wrong)}: JAX has them over Explicit axes "
            "only. Make the mesh with jax.make_mesh, or with axis_types=AxisType.Explicit."
        )
    sums = unreduced(said), reduction(said), reduced(said)
    spec = open_spec(entries_of(sharding.spec), *sums)
    return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def resharded(x: jax.Array, sharding: Any) -> jax.Array:
    """Take sums, make terms, or change the layout of terms; by JAX's own `reshard`.

    Args:
        x: on the mesh of `sharding`, or traced over that mesh.
        sharding: a NamedSharding over a mesh whose axes are all Explicit.

    Raises:
        ShardingError: some axis of the mesh is not Explicit.
    """
    if not sharding.mesh.are_all_axes_explicit:
        raise ShardingError(
            f"{sharding.spec} over a mesh of axis types {sharding.mesh.axis_types}: JAX takes and "
            "makes such sums where all axes are Explicit. Lay the operands out over a mesh as "
            "jax.make_mesh makes it."
        )
    have = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
    if isinstance(x, Tracer):  # where JAX takes no word on the usual memory
        kind = None if sharding.memory_kind == "device" else sharding.memory_kind
        sharding = NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind)
    if unreduced(have) and unreduced(sharding) and not same_terms(have, sharding):
        x = jax.sharding.reshard(x, stored(sharding))  # XLA ends the process otherwise
    return jax.sharding.reshard(x, sharding)


_TAKE = "Take them first: iso.full(x), or iso.reshard(x, spec) with a spec without unreduced=."


def refuse(layout: Any, holder: str, fix: str = _TAKE, *, name: str = "") -> None:
    """Raise where there are sums still to be taken.

    Args:
        layout: a sharding or a PartitionSpec.
        holder: what cannot hold them, for the message.
        fix: what to do, for the message.
        name: of the tensor, for the message.

    Raises:
        UnrepresentableError: there are some.
    """
    if names := unreduced(layout):
        spec = layout.spec if isinstance(layout, NamedSharding) else layout
        raise UnrepresentableError(
            f"{name and f'{name}: '}{spec} says that sums over mesh axis "
            f"{', '.join(map(repr, names))} are still to be taken, and {holder}. {fix}"
        )


def _axes(layout: Any, kind: str) -> tuple[str, ...]:
    spec = getattr(layout, "spec", layout)
    return tuple(sorted(getattr(spec, kind, ()))) if isinstance(spec, P) else ()
