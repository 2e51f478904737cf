"""Operators with their own partitioning, by JAX's `custom_partitioning`.

XLA's partitioner calls back into Python for the per-device function of such an operator, when the
shardings of its operands are known. The API is experimental; all uses of it are in this module, and
its private names in `_jax_internals`. Tested with JAX 0.9.0 and 0.10.2, whose Shardy partitioner
uses the sharding rule, on virtual CPU devices.

>>> import jax.numpy as jnp
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> def split(power, mesh, operands, results):
...     (x,) = operands
...     return mesh, lambda x: x**power, x.sharding, (x.sharding,)
>>> raised = partitioned(lambda power, x: x**power, split, lambda power, shapes: ("i -> i", {}))
>>> x = shard(jnp.arange(8.0), make_mesh((4,), ("x",)), ("x",))
>>> jax.jit(lambda x: raised(2, x))(x).tolist()
[0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0]

**The persistent compilation cache.** The text of such a program contains the address of a Python
object, so that no other process would find it in the cache, but not the static arguments. So every
operator here has one more operand, a constant hash of these and of isoshard's sources, and
`compiled` leaves the address out of the key.

**Many processes.** Each compiles the same program and gets the same callbacks. Their results must
depend on shardings, shapes and the static arguments only.

**Limits.** JAX compiles such an operator only if all shardings of the program are on one mesh, and
isoshard uses none inside `jax.shard_map`: `possible`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from isoshard.core.installation import source_digest
from isoshard.core.runtime import _jax_internals
from isoshard.core.runtime._jax_internals.compilation import CUSTOM_PARTITIONING

from .mesh import mesh_of
from .spec_entries import axis_names, entries_of
from .split_operator import Mapped, Pulls, SplitOperator, Static

Rule = tuple[str, dict[str, int]]
"""The sharding rule, and the sizes of factors that occur in products only."""

_TARGET = "CustomSPMDPartitioning"
_STAMP = "stamp"
_lowered: contextvars.ContextVar[list[Static]] = contextvars.ContextVar("lowered")
_single_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("single_mesh", default=True)


def partitioned(
    unsplit: Callable[..., Any],
    split: Callable[..., tuple[Any, Callable[..., Any], Any, tuple[Any, ...]]],
    rule: Callable[[Static, tuple[tuple[int, ...], ...]], Rule],
    linear: Callable[[Static], Pulls | None] = lambda static: None,
) -> SplitOperator:
    """Create an operator from a function of global arrays.

    Args:
        unsplit: `unsplit(static, *operands)`, the reference; also used on a single device. Operands
            are arrays or None.
        split: `split(static, mesh, operands, results)` of structs with shardings, on the mesh of
            the program or, where the compiler splits an array axis over a factor of a mesh axis, on
            a mesh with that axis in factors. Returns the mesh, a function of this device's shards
            (which may name mesh axes in collectives), and the shardings of results and operands
            that it requires.
        rule: `rule(static, operand shapes)`, the sharding rule as in `custom_partitioning`:
            `"i j, j k -> i k"`; and the sizes that it requires.
        linear: `linear(static)`, the `Pulls` of an operator of arrays with one result that is
            linear in each of them; None for any other.

    Returns:
        A function `(static, *operands)`. Its derivatives are those of `unsplit`, which the compiler
        splits as it can, or those given as `linear`. Under `jax.vmap` it is such an operator too,
        split as it was and along the axis that is mapped.
    """

    def stamped(context: _Context, operands: tuple[Any, ...], _stamp: Any) -> Any:
        return unsplit(context.static, *operands)

    def splitting(context: _Context, mesh: Any, operands: Any, results: Any) -> Any:
        # Source locations in the returned program keep their ids, while XLA inlines it into a
        # program with ids of its own; some then form a cycle, in which xla::StackFrames::IsPrefix
        # never ends (jaxlib 0.10). So locations are off in this thread of XLA's.
        _jax_internals.without_locations()
        mesh, (operands, results) = _decoded(mesh, (operands, results))
        arrays, _ = operands
        mesh, local, out, need = split(context.static, mesh, arrays, results)
        replicated = NamedSharding(mesh, PartitionSpec())

        def shard(operands: tuple[Any, ...], _stamp: Any) -> Any:
            # XLA calls back in a thread of its own, without the caller's JAX configuration.
            with jax.numpy_dtype_promotion("standard"), jax.enable_x64(context.x64):
                return local(*operands)

        return mesh, shard, out, (tuple(need), replicated)

    def corresponding(context: _Context, mesh: Any, operands: Any, results: Any) -> Rule:
        shapes = tuple(tuple(x.shape) for x in operands[:-1])
        _lowered.get([]).append(context.static)
        text, sizes = rule(context.static, shapes)
        left, right = text.split(" -> ")
        return f"{left}, {_STAMP} -> {right}", sizes

    @functools.cache
    def operator() -> Any:
        operation = CUSTOM_PARTITIONING.resolve()(stamped, static_argnums=(0,))
        operation.def_partition(
            partition=splitting, sharding_rule=corresponding, decode_shardings=False
        )
        return operation

    def call(static: Static) -> tuple[Callable[..., Any], np.ndarray]:
        context = _Context(static, bool(jax.config.read("jax_enable_x64")))
        return functools.partial(operator(), context), _stamp_of(unsplit, context)

    mapped = functools.cache(lambda: _mapped(unsplit, split, rule, linear))
    return SplitOperator(unsplit, call, mapped, linear)


def _mapped(unsplit: Any, split: Any, rule: Any, linear: Any) -> SplitOperator:
    """The operator under `jax.vmap`, from the arguments of `partitioned`."""

    @functools.wraps(unsplit)
    def mapped_unsplit(mapped: Mapped, *operands: Any) -> Any:
        return mapped.over(functools.partial(unsplit, mapped.static))(*operands)

    def mapped_split(mapped: Mapped, mesh: Mesh, operands: Any, results: Any) -> Any:
        pairs = zip(mapped.axes, operands, strict=True)
        added = [*(x for is_mapped, x in pairs if is_mapped), *jax.tree.leaves(results)]
        names = next(filter(None, (_names(x)[0] for x in added)), ())

        def below(x: Any, is_mapped: bool | None = True) -> Any:
            entries = _names(x)[1 if is_mapped else 0 :]
            spec = PartitionSpec(*(tuple(n for n in axis if n not in names) for axis in entries))
            shape = x.shape[1:] if is_mapped else x.shape
            return jax.ShapeDtypeStruct(
                shape, x.dtype, sharding=NamedSharding(x.sharding.mesh, spec)
            )

        def above(layout: NamedSharding, is_mapped: bool | None = True) -> NamedSharding:
            spec = PartitionSpec(names, *entries_of(layout.spec)) if is_mapped else layout.spec
            return NamedSharding(layout.mesh, spec)

        pairs = zip(operands, mapped.axes, strict=True)
        arrays = tuple(x if x is None else below(x, is_mapped) for x, is_mapped in pairs)
        mesh, local, out, need = split(mapped.static, mesh, arrays, jax.tree.map(below, results))
        pairs = zip(need, mapped.axes, strict=True)
        needed = tuple(
            is_mapped if is_mapped is None else above(layout, is_mapped)
            for layout, is_mapped in pairs
        )
        return mesh, mapped.over(local), jax.tree.map(above, out), needed

    def mapped_rule(mapped: Mapped, shapes: tuple[tuple[int, ...], ...]) -> Rule:
        axes = [is_mapped for is_mapped in mapped.axes if is_mapped is not None]
        below = (
            shape[1:] if is_mapped else shape for shape, is_mapped in zip(shapes, axes, strict=True)
        )
        text, sizes = rule(mapped.static, tuple(below))
        name = f"vmap{_depth(mapped)}"
        left, right = (side.split(", ") for side in text.split(" -> "))
        pairs = zip(left, axes, strict=True)
        left = [f"{name} {axis}".strip() if is_mapped else axis for axis, is_mapped in pairs]
        return f"{', '.join(left)} -> {', '.join(f'{name} {axis}' for axis in right)}", sizes

    def mapped_linear(mapped: Mapped) -> Pulls | None:
        pulls = linear(mapped.static)
        axes = [0 if is_mapped else None for is_mapped in mapped.axes]

        def over(pull: Any, is_mapped: bool | None) -> Any:
            vmapped = jax.vmap(pull, (0, *axes))
            return vmapped if is_mapped else lambda *args: vmapped(*args).sum(0)

        pairs = zip(pulls or (), mapped.axes, strict=pulls is not None)
        return pulls and tuple(pull and over(pull, is_mapped) for pull, is_mapped in pairs)

    return partitioned(mapped_unsplit, mapped_split, mapped_rule, mapped_linear)


def _depth(static: Static) -> int:
    return _depth(static.static) + 1 if isinstance(static, Mapped) else 0


def _names(x: Any) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of a shape with a layout."""
    entries = entries_of(x.sharding.spec)
    return [*map(axis_names, entries), *[()] * (len(x.shape) - len(entries))]


def _decoded(mesh: Mesh, shapes: Any) -> tuple[Mesh, Any]:
    """Structs with the compiler's shardings as structs over a mesh, and that mesh."""
    leaves, structure = jax.tree.flatten(shapes)
    for grid in (mesh, _in_factors(mesh), _in_factors(mesh, largest_first=True)):
        specs = [_spec(x, grid) for x in leaves]
        if None not in specs:
            break
    else:  # a sharding that no such mesh has is gathered
        grid, specs = mesh, [_spec(x, mesh) for x in leaves]
    structs = [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(grid, spec or PartitionSpec())
        )
        for x, spec in zip(leaves, specs, strict=True)
    ]
    return grid, jax.tree.unflatten(structure, structs)


def _spec(x: Any, mesh: Mesh) -> PartitionSpec | None:
    """The spec of a struct over a mesh; None if the mesh cannot express it."""
    if isinstance(x.sharding, NamedSharding):  # called by us, not by XLA
        return x.sharding.spec
    try:
        entries = _jax_internals.layout_entries(x.sharding, mesh)
    except (ValueError, KeyError, AssertionError):  # the three that JAX raises for it
        return None
    return PartitionSpec(*entries, *[None] * (len(x.shape) - len(entries)))


def _in_factors(mesh: Mesh, largest_first: bool = False) -> Mesh:
    """The same devices, with each axis split into axes of prime size.

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


class _Context(NamedTuple):
    """The static arguments, and whether the program around it has 64-bit types."""

    static: Static
    x64: bool


def _stamp_of(unsplit: Callable[..., Any], context: _Context) -> np.ndarray:
    text = f"{source_digest()} {unsplit.__module__}.{unsplit.__qualname__} {context!r}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)


def compiled(
    lower: Callable[[], jax.stages.Lowered],
    options: Callable[[], dict[str, Any]] = dict[str, Any],
) -> jax.stages.Compiled:
    """Compile a program so that later processes find it in the persistent cache.

    With other libraries' operators of this kind in the program, the key keeps the addresses, since
    nothing else distinguishes them.

    Args:
        lower: traces and lowers the program.
        options: XLA's, by its names; called when the program is lowered.

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
def shardings_of_program(layouts: Iterable[Sharding]) -> Iterator[None]:
    """Declare the shardings of the program being traced, for `possible` inside."""
    meshes = {mesh_of(layout) for layout in layouts if isinstance(layout, NamedSharding)}
    token = _single_mesh.set(len(meshes) <= 1)
    try:
        yield
    finally:
        _single_mesh.reset(token)


def possible() -> bool:
    """Whether the program being traced may have such operators.

    Returns:
        False inside `jax.shard_map`, where arrays are shards already, and in a program that is over
        several meshes by `shardings_of_program`.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> meshes = make_mesh((4,), ("x",)), make_mesh((2, 2), ("x", "y"))
        >>> with shardings_of_program(NamedSharding(mesh, PartitionSpec()) for mesh in meshes):
        ...     possible()
        False
    """
    return _single_mesh.get() and not jax.sharding.get_abstract_mesh().manual_axes
