"""Operators that say themselves how they are split over a mesh; a part of JAX that may change.

JAX's `custom_partitioning` asks a function, when XLA's partitioner meets the operator, what each
device is to do: by then the layouts of its operands are known. It is experimental; all that
isoshard uses of it stands here, and what has no public name in `_jax_internals`. Tried with JAX
0.9.0 and 0.10.2, whose Shardy partitioner takes the rule that is given, on virtual CPU devices.

>>> import jax.numpy as jnp
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.place import shard
>>> def split(power, mesh, operands, results):
...     (x,) = operands
...     return mesh, lambda x: x**power, x.sharding, (x.sharding,)
>>> raised = partitioned(lambda power, x: x**power, split, lambda power, shapes: ("i -> i", {}))
>>> x = shard(jnp.arange(8.0), make_mesh((4,), ("x",)), ("x",))
>>> jax.jit(lambda x: raised(2, x))(x).tolist()
[0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0]

**The persistent compilation cache.** The text of such a program has the address of a Python object
in it, so that no other process would find it in the cache, and does not have the static arguments.
So every operator here has one more operand, a constant made of these and of the version of
isoshard, and `compiled` leaves the address out of the key. Who changes what such an operator
computes, and not the version, empties the cache.

**Many processes.** Each compiles the same program and is asked the same. What is answered depends
on nothing but layouts, shapes and the static arguments.

**Where it cannot be.** JAX compiles such an operator only where all layouts of the program are on
one mesh, and isoshard asks for none inside `jax.shard_map`: `possible`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from isoshard.core.runtime import _jax_internals
from isoshard.core.runtime._jax_internals.compilation import CUSTOM_PARTITIONING

from .mesh import mesh_of
from .spec_entries import axis_names, entries_of
from .split_operator import Mapped, Pulls, SplitOperator, Static

Rule = tuple[str, dict[str, int]]
"""How axes correspond, and the sizes of factors that stand in products only."""

_TARGET = "CustomSPMDPartitioning"
_STAMP = "stamp"
_lowered: contextvars.ContextVar[list[Static]] = contextvars.ContextVar("lowered")
_one_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("one_mesh", default=True)


def partitioned(
    whole: Callable[..., Any],
    split: Callable[..., tuple[Any, Callable[..., Any], Any, tuple[Any, ...]]],
    rule: Callable[[Static, tuple[tuple[int, ...], ...]], Rule],
    linear: Callable[[Static], Pulls | None] = lambda static: None,
) -> SplitOperator:
    """Make an operator of a function of whole arrays.

    Args:
        whole: `whole(static, *operands)`, what is computed; also on a single device. Operands are
            arrays or None.
        split: `split(static, mesh, operands, results)` of shapes with their layouts, on the mesh of
            the program or, where the compiler splits an axis by a part of a mesh axis, on one with
            that axis in factors. Gives the mesh, a function of this device's shards (which may
            name mesh axes in collectives), and the layouts of results and operands that it needs.
        rule: `rule(static, operand shapes)`, how axes of operands and results correspond, as
            `custom_partitioning` writes it: `"i j, j k -> i k"`; and the sizes that it asks for.
        linear: `linear(static)`, the `Pulls` of an operator of arrays with one result that is
            linear in each of them; None for any other.

    Returns:
        A function `(static, *operands)`. Its derivatives are those of `whole`, which the compiler
        splits as it can, or what `linear` says. Under `jax.vmap` it is such an operator too, split
        as it was and along the axis that is mapped.
    """

    def stamped(known: _Known, operands: tuple[Any, ...], _stamp: Any) -> Any:
        return whole(known.static, *operands)

    def splitting(known: _Known, mesh: Any, operands: Any, results: Any) -> Any:
        # Source locations in the answer keep their numbers, while XLA puts it into a program with
        # numbers of its own; some then form a cycle, in which xla::StackFrames::IsPrefix runs for
        # ever. In this thread of XLA's there are none.
        _jax_internals.without_locations()
        mesh, (operands, results) = _decoded(mesh, (operands, results))
        given, _ = operands
        mesh, local, out, need = split(known.static, mesh, given, results)
        alone = NamedSharding(mesh, PartitionSpec())

        def shard(operands: tuple[Any, ...], _stamp: Any) -> Any:
            # XLA asks in a thread of its own, where nothing is set.
            with jax.numpy_dtype_promotion("standard"), jax.enable_x64(known.x64):
                return local(*operands)

        return mesh, shard, out, (tuple(need), alone)

    def corresponding(known: _Known, mesh: Any, operands: Any, results: Any) -> Rule:
        shapes = tuple(tuple(x.shape) for x in operands[:-1])
        _lowered.get([]).append(known.static)
        text, sizes = rule(known.static, shapes)
        left, right = text.split(" -> ")
        return f"{left}, {_STAMP} -> {right}", sizes

    @functools.cache
    def operator() -> Any:
        operation = CUSTOM_PARTITIONING.found()(stamped, static_argnums=(0,))
        operation.def_partition(
            partition=splitting, sharding_rule=corresponding, decode_shardings=False
        )
        return operation

    def ask(static: Static) -> tuple[Callable[..., Any], np.ndarray]:
        known = _Known(static, bool(jax.config.read("jax_enable_x64")))
        return functools.partial(operator(), known), _stamp_of(whole, known)

    mapped = functools.cache(lambda: _mapped(whole, split, rule, linear))
    return SplitOperator(whole, ask, mapped, linear)


def _mapped(whole: Any, split: Any, rule: Any, linear: Any) -> SplitOperator:
    """The operator under `jax.vmap`, of what `partitioned` takes."""

    @functools.wraps(whole)
    def mapped_whole(mapped: Mapped, *operands: Any) -> Any:
        return mapped.over(functools.partial(whole, mapped.static))(*operands)

    def mapped_split(mapped: Mapped, mesh: Mesh, operands: Any, results: Any) -> Any:
        pairs = zip(mapped.axes, operands, strict=True)
        added = [*(x for own, x in pairs if own), *jax.tree.leaves(results)]
        names = next(filter(None, (_names(x)[0] for x in added)), ())

        def below(x: Any, own: bool | None = True) -> Any:
            entries = _names(x)[1 if own else 0 :]
            spec = PartitionSpec(*(tuple(n for n in axis if n not in names) for axis in entries))
            shape = x.shape[1:] if own else x.shape
            return jax.ShapeDtypeStruct(
                shape, x.dtype, sharding=NamedSharding(x.sharding.mesh, spec)
            )

        def above(layout: NamedSharding, own: bool | None = True) -> NamedSharding:
            spec = PartitionSpec(names, *entries_of(layout.spec)) if own else layout.spec
            return NamedSharding(layout.mesh, spec)

        pairs = zip(operands, mapped.axes, strict=True)
        given = tuple(x if x is None else below(x, own) for x, own in pairs)
        mesh, local, out, need = split(mapped.static, mesh, given, jax.tree.map(below, results))
        pairs = zip(need, mapped.axes, strict=True)
        needed = tuple(own if own is None else above(layout, own) for layout, own in pairs)
        return mesh, mapped.over(local), jax.tree.map(above, out), needed

    def mapped_rule(mapped: Mapped, shapes: tuple[tuple[int, ...], ...]) -> Rule:
        axes = [own for own in mapped.axes if own is not None]
        below = (shape[1:] if own else shape for shape, own in zip(shapes, axes, strict=True))
        text, sizes = rule(mapped.static, tuple(below))
        name = f"vmap{_depth(mapped)}"
        left, right = (side.split(", ") for side in text.split(" -> "))
        pairs = zip(left, axes, strict=True)
        left = [f"{name} {axis}".strip() if own else axis for axis, own in pairs]
        return f"{', '.join(left)} -> {', '.join(f'{name} {axis}' for axis in right)}", sizes

    def mapped_linear(mapped: Mapped) -> Pulls | None:
        pulls = linear(mapped.static)
        axes = [0 if own else None for own in mapped.axes]

        def over(pull: Any, own: bool | None) -> Any:
            every = jax.vmap(pull, (0, *axes))
            return every if own else lambda *given: every(*given).sum(0)

        pairs = zip(pulls or (), mapped.axes, strict=pulls is not None)
        return pulls and tuple(pull and over(pull, own) for pull, own in pairs)

    return partitioned(mapped_whole, mapped_split, mapped_rule, mapped_linear)


def _depth(static: Static) -> int:
    return _depth(static.static) + 1 if isinstance(static, Mapped) else 0


def _names(x: Any) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of a shape with a layout."""
    entries = entries_of(x.sharding.spec)
    return [*map(axis_names, entries), *[()] * (len(x.shape) - len(entries))]


def _decoded(mesh: Mesh, shapes: Any) -> tuple[Mesh, Any]:
    """Shapes with the compiler's layouts as ones with those of a mesh, and the mesh."""
    leaves, structure = jax.tree.flatten(shapes)
    for grid in (mesh, _in_factors(mesh), _in_factors(mesh, largest_first=True)):
        specs = [_spec(x, grid) for x in leaves]
        if None not in specs:
            break
    else:  # a layout of no such mesh is gathered
        grid, specs = mesh, [_spec(x, mesh) for x in leaves]
    found = [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(grid, spec or PartitionSpec())
        )
        for x, spec in zip(leaves, specs, strict=True)
    ]
    return grid, jax.tree.unflatten(structure, found)


def _spec(x: Any, mesh: Mesh) -> PartitionSpec | None:
    """The layout of a shape in the names of a mesh; None if the mesh has none for it."""
    if isinstance(x.sharding, NamedSharding):  # asked by us, not by XLA
        return x.sharding.spec
    try:
        entries = _jax_internals.layout_entries(x.sharding, mesh)
    except (ValueError, KeyError, AssertionError):  # the three ways in which JAX says so
        return None
    return PartitionSpec(*entries, *[None] * (len(x.shape) - len(entries)))


def _in_factors(mesh: Mesh, largest_first: bool = False) -> Mesh:
    """The same devices, each axis as several of prime sizes.

    >>> from isoshard.core.layout.mesh import make_mesh
    >>> dict(_in_factors(make_mesh((2, 4), ("x", "y"))).shape)
    {'x': 2, 'y/0': 2, 'y/1': 2}
    """
    shape: dict[str, int] = {}
    for name, size in mesh.shape.items():
        factors = sorted(_factors(size), reverse=largest_first) or [1]
        alone = len(factors) == 1
        shape |= {name if alone else f"{name}/{n}": m for n, m in enumerate(factors)}
    return Mesh(mesh.devices.reshape(tuple(shape.values())), tuple(shape))


def _factors(size: int) -> list[int]:
    """The prime factors of a number, the smallest first."""
    factor = next((n for n in range(2, size + 1) if size % n == 0), None)
    return [] if factor is None else [factor, *_factors(size // factor)]


class _Known(NamedTuple):
    """The static arguments, and whether the program around it has 64-bit types."""

    static: Static
    x64: bool


def _stamp_of(whole: Callable[..., Any], known: _Known) -> np.ndarray:
    text = f"{metadata.version('isoshard')} {whole.__module__}.{whole.__qualname__} {known!r}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)


def compiled(
    lower: Callable[[], jax.stages.Lowered],
    options: Callable[[], dict[str, Any]] = dict[str, Any],
) -> jax.stages.Compiled:
    """Compile a program so that later processes find it in the persistent cache.

    If somebody else's operators of this kind are in it the key keeps their address, which is then
    all that tells one from another.

    Args:
        lower: traces and lowers the program.
        options: XLA's, by its names; called when the program is lowered.

    Returns:
        The program.

    Example:
        >>> compiled(lambda: jax.jit(lambda x: x + 1).lower(1.0))(1.0).item()
        2.0
    """
    token = _lowered.set([])
    try:
        program = lower()
        ours = len(_lowered.get([]))
    finally:
        _lowered.reset(token)
    if not ours or program.as_text().count(f"@{_TARGET}(") != ours:
        return program.compile(options())
    with _jax_internals.cached_without_addresses():
        return program.compile(options())


@contextlib.contextmanager
def laid_out(layouts: Iterable[Sharding]) -> Iterator[None]:
    """Say which layouts the program being traced names, for `possible` inside."""
    meshes = {mesh_of(layout) for layout in layouts if isinstance(layout, NamedSharding)}
    token = _one_mesh.set(len(meshes) <= 1)
    try:
        yield
    finally:
        _one_mesh.reset(token)


def possible() -> bool:
    """Whether what is being traced may have such operators.

    Returns:
        False inside `jax.shard_map`, where arrays are shards already, and in a program of which
        `laid_out` says that it names several meshes.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> meshes = make_mesh((4,), ("x",)), make_mesh((2, 2), ("x", "y"))
        >>> with laid_out(NamedSharding(mesh, PartitionSpec()) for mesh in meshes):
        ...     possible()
        False
    """
    return _one_mesh.get() and not jax.sharding.get_abstract_mesh().manual_axes
