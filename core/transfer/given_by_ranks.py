"""What the processes give to `shard` is compared before it is laid out.

Each process of the mesh gives the whole, and places what its own devices hold of it. Were the
wholes not the same, the array would be made of parts that do not belong together: other rows here
than there, a weight that each rank has drawn with a seed of its own. So the processes tell each
other, in one short message, how each leaf is called, its shape, dtype and layout, and a sum over
the bits of its values (`value_sums`); no data moves.

An array that lies on several processes already is compared by its layout, once for each new one: it
has one value. Values of a JAX transformation, and trees of nothing but shapes, are not compared,
and neither does a process take part that owns no device of the mesh.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from isoshard.core.errors import CopyError, DistributedError, ShardingError
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.in_shard_map import manual_axes
from isoshard.core.layout.mesh import describe_mesh
from isoshard.core.layout.spec import named_sharding
from isoshard.core.plan import Plan
from isoshard.core.processes.agreement import assert_equal, error_lines, log_call, without_addresses
from isoshard.core.processes.coordination import rank_and_size
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.bounded import Bounded

from .array_like import from_literal, is_literal
from .leaf_specs import NamedArray, assign, named_arrays
from .process_local import owners_of
from .shard_arguments import mesh_and_spec
from .value_sums import value_sum

SUBJECT = "what iso.shard is given"

_OPTIONS = ("uneven", "sizes", "memory")

_nested: contextvars.ContextVar[bool] = contextvars.ContextVar("nested", default=False)
_agreed: dict[tuple[int, ...], Bounded[tuple[str, ...], bool]] = {}


def place_alike(
    x: Any,
    mesh: Any,
    spec: Any,
    options: dict[str, Any],
    copy: bool | None,
    name: str | None,
    place: Callable[[], Any],
) -> Any:
    """Place, once the processes of the mesh have found that they were given the same.

    Args:
        x: as for `shard`, and so `mesh`, `spec`, `copy` and `name`.
        mesh: see there.
        spec: see there.
        options: others that must be the same, by name.
        copy: see there.
        name: see there.
        place: lays it out.

    Returns:
        What `place` returns.

    Raises:
        DistributedError: in every process of the mesh: who was given what.
    """
    if options["check"] != "values":
        raise ShardingError(f"check is 'values' or 'off', given was {options['check']!r}")
    if not _nested.get() and not manual_axes():
        _compare(x, mesh, spec, options, copy, name)
    token = _nested.set(True)
    try:
        return place()
    finally:
        _nested.reset(token)


def _compare(
    x: Any, mesh: Any, spec: Any, options: dict[str, Any], copy: bool | None, name: str | None
) -> None:
    """Have the processes of the mesh say what they are given, if there are others."""
    me, size = rank_and_size()
    ranks, moving = tuple(range(size)), True
    try:
        mesh, spec = mesh_and_spec(mesh, spec)
        if not isinstance(mesh, Mesh):
            return log_call(SUBJECT, None)
        ranks = owners_of(mesh)
        if len(ranks) == 1 or me not in ranks:
            return log_call(SUBJECT, None if me in ranks else partial(_told_mesh, mesh))
        said = [f"{key}={options[key]!r}" for key in _OPTIONS if options[key] is not None]
        if options["uneven"] == "pad" and isinstance(spec, Plan):
            said.append(f"{spec!r}")  # it refuses what does not divide, which is padded here
            spec = None
        leaves = _GivenLeaves(x, mesh, spec, copy, name)
        if not leaves.data:
            return log_call(SUBJECT, partial("; ".join, leaves.lines()))
        lines, moving = [*leaves.lines(), *said], leaves.moving
    except DistributedError:
        raise
    except Exception as error:  # `place` raises it, if all of them say the same
        lines = error_lines(error)
    lines = without_addresses(lines)
    known = _agreed.setdefault(ranks, Bounded(4096))
    if not moving and tuple(lines) in known:
        return log_call(SUBJECT, partial("; ".join, lines))
    assert_equal(SUBJECT, lines, ranks)
    if not moving:
        known[tuple(lines)] = True


class _GivenLeaves:
    """What a process is given, leaf by leaf.

    Attributes:
        data: whether there is an array with values.
        moving: whether there is one of which each process has a whole of its own.
    """

    def __init__(self, x: Any, mesh: Mesh, spec: Any, copy: bool | None, name: str | None):
        if is_literal(x):
            x, copy = from_literal(x, copy, name or "array"), None
        framework = framework_of(x)
        if framework is not None:
            called = name or framework.name
            leaves = [NamedArray(called, called, x, framework, spec)]
        else:
            leaves, structure = named_arrays(x, name)
            assign(leaves, structure, mesh, spec, name)
        self._mesh, self._copy = mesh, copy
        self.data = self.moving = False
        self._told = [line for leaf in leaves for line in self._lines_of(leaf)]
        if any(isinstance(leaf.value, Tracer) for leaf in leaves):
            self.data = False

    def lines(self) -> list[str]:
        """One for the mesh, and one for each leaf."""
        return [_told_mesh(self._mesh), *self._told]

    def _lines_of(self, leaf: NamedArray) -> list[str]:
        if leaf.stays:
            plain = isinstance(leaf.value, bool | int | float | complex | str)
            told = repr(leaf.value) if plain else f"a {type(leaf.value).__name__}"
            return [f"{leaf.name}: {told}"]
        if leaf.framework is None:
            return [f"{leaf.name}: {self._array(leaf)}"]
        spec = leaf.spec
        laid: Any = {}
        if isinstance(spec, Plan) and leaf.shape is None:
            laid = spec.resolve(leaf.value, self._mesh).specs
        elif leaf.shape is not None:
            laid = {"": self._by(leaf)}
        elements = leaf.framework.elements(leaf.value)
        lines = []
        for part in {**elements, **laid}:
            told = f"{leaf.name}.{part}:" if part else f"{leaf.name}:"
            if part in elements:
                value = elements[part]
                told += f" {tuple(value.shape)} {value.dtype}{self._values(value)}"
            lines.append(f"{told} by {laid[part]}" if part in laid else told)
        if not laid:
            lines.append(f"{leaf.name}: a {type(leaf.value).__name__} by {spec!r}")
        return lines

    def _array(self, leaf: NamedArray) -> str:
        value = leaf.value
        told = f"{tuple(value.shape)} {value.dtype} by {self._by(leaf)}{self._values(value)}"
        if self._copy is False and isinstance(leaf.check(self._mesh, False), CopyError):
            told += ", which cannot be shared"
        return told

    def _by(self, leaf: NamedArray) -> Any:
        if isinstance(leaf.spec, Plan):
            return leaf.spec
        ndim = len(leaf.shape or ())
        found = named_sharding(leaf.spec, self._mesh, ndim, name=leaf.name, sums=True)
        memory = leaf.spec.memory_kind if isinstance(leaf.spec, NamedSharding) else None
        return found.spec if memory is None else f"{found.spec} in {memory}"

    def _values(self, value: Any) -> str:
        if isinstance(value, jax.ShapeDtypeStruct | Tracer):
            return ""
        self.data = True
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return f", lying by {value.sharding}"
        if isinstance(value, np.ndarray | jax.Array):
            self.moving = True
            return f", values {value_sum(value)}"
        return ""


@lru_cache(maxsize=256)
def _told_mesh(mesh: Mesh) -> str:
    """A mesh in words; cached, as it may have thousands of devices."""
    return f"mesh {describe_mesh(mesh)} of devices {[device.id for device in mesh.devices.flat]}"
