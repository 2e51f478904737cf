"""The multi-host check of `shard`: all processes of the mesh must pass the same arguments.

Each process passes the global array, and puts the shards of its own devices. If the arrays were not
equal, the result would mix them: rows in another order, a weight that each rank initialized with a
seed of its own. So the processes exchange one short message with each leaf's name, shape, dtype and
spec, and a checksum of its values (`value_sums`); no array data is sent.

An array that is on several processes already has one value, and is compared by its sharding, once
for each new one. Traced values and trees of only shapes are not compared, and a process that owns
no device of the mesh does not take part.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
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
from isoshard.core.runtime.caches import Bounded, cached

from .array_like import from_literal, is_literal
from .leaf_specs import NamedArray, named_arrays, set_specs
from .process_local import owners_of
from .shard_arguments import mesh_and_spec
from .value_sums import value_sum

SUBJECT = "what iso.shard is given"

_OPTIONS = ("uneven", "sizes", "memory")

_nested: contextvars.ContextVar[bool] = contextvars.ContextVar("nested", default=False)
_agreed: dict[tuple[int, ...], Bounded[tuple[str, ...], bool]] = {}


def checked_across_hosts(
    x: Any,
    mesh: Any,
    spec: Any,
    options: dict[str, Any],
    copy: bool | None,
    name: str | None,
    put: Callable[[], Any],
) -> Any:
    """Call `put` after the processes of the mesh have compared the arguments of `shard`.

    `options` are compared too. Nested calls of `shard` are not checked again.

    Raises:
        DistributedError: in every process of the mesh, with what each process passed.
    """
    if options["check"] != "values":
        raise ShardingError(f"check is 'values' or 'off', not {options['check']!r}")
    if not _nested.get() and not manual_axes():
        _compare(x, mesh, spec, options, copy, name)
    token = _nested.set(True)
    try:
        return put()
    finally:
        _nested.reset(token)


def _compare(
    x: Any, mesh: Any, spec: Any, options: dict[str, Any], copy: bool | None, name: str | None
) -> None:
    """Have the processes of the mesh compare their arguments, if there are several."""
    me, size = rank_and_size()
    ranks, has_local_data = tuple(range(size)), True
    try:
        mesh, spec = mesh_and_spec(mesh, spec)
        if not isinstance(mesh, Mesh):
            return log_call(SUBJECT, None)
        ranks = owners_of(mesh)
        if len(ranks) == 1 or me not in ranks:
            return log_call(SUBJECT, None if me in ranks else partial(_mesh_line, mesh))
        lines_of_options = [
            f"{key}={options[key]!r}" for key in _OPTIONS if options[key] is not None
        ]
        if options["uneven"] == "pad" and isinstance(spec, Plan):
            lines_of_options.append(
                f"{spec!r}"
            )  # resolving raises for axes that do not divide, which are padded here
            spec = None
        leaves = _LeafLines(x, mesh, spec, copy, name)
        if not leaves.has_data:
            return log_call(SUBJECT, partial("; ".join, leaves.lines()))
        lines, has_local_data = [*leaves.lines(), *lines_of_options], leaves.has_local_data
    except DistributedError:
        raise
    except Exception as error:  # compared too: `put` raises it if all processes have it
        lines = error_lines(error)
    lines = without_addresses(lines)
    new = Bounded[tuple[str, ...], bool](4096, "shard: what processes agreed on", agreed=True)
    cache = _agreed.setdefault(ranks, new)
    if not has_local_data and tuple(lines) in cache:
        return log_call(SUBJECT, partial("; ".join, lines))
    assert_equal(SUBJECT, lines, ranks)
    if not has_local_data:
        cache[tuple(lines)] = True


class _LeafLines:
    """A process's arguments of `shard` as lines of text, one per leaf.

    Attributes:
        has_data: whether there is an array with values.
        has_local_data: whether there is one of which each process has its own copy.
    """

    def __init__(self, x: Any, mesh: Mesh, spec: Any, copy: bool | None, name: str | None):
        if is_literal(x):
            x, copy = from_literal(x, copy, name or "array"), None
        framework = framework_of(x)
        if framework is not None:
            label = name or framework.name
            leaves = [NamedArray(label, label, x, framework, spec)]
        else:
            leaves, structure = named_arrays(x, name)
            set_specs(leaves, structure, mesh, spec, name)
        self._mesh, self._copy = mesh, copy
        self.has_data = self.has_local_data = False
        self._leaf_lines = [line for leaf in leaves for line in self._lines_of(leaf)]
        if any(isinstance(leaf.value, Tracer) for leaf in leaves):
            self.has_data = False

    def lines(self) -> list[str]:
        """One line for the mesh, and one for each leaf."""
        return [_mesh_line(self._mesh), *self._leaf_lines]

    def _lines_of(self, leaf: NamedArray) -> list[str]:
        if leaf.is_passthrough:
            is_plain = isinstance(leaf.value, bool | int | float | complex | str)
            text = repr(leaf.value) if is_plain else f"a {type(leaf.value).__name__}"
            return [f"{leaf.name}: {text}"]
        if leaf.framework is None:
            return [f"{leaf.name}: {self._array(leaf)}"]
        spec = leaf.spec
        specs: Any = {}
        if isinstance(spec, Plan) and leaf.shape is None:
            specs = spec.resolve(leaf.value, self._mesh).specs
        elif leaf.shape is not None:
            specs = {"": self._spec(leaf)}
        elements = leaf.framework.elements(leaf.value)
        lines = []
        for path in {**elements, **specs}:
            text = f"{leaf.name}.{path}:" if path else f"{leaf.name}:"
            if path in elements:
                value = elements[path]
                text += f" {tuple(value.shape)} {value.dtype}{self._values(value)}"
            lines.append(f"{text} by {specs[path]}" if path in specs else text)
        if not specs:
            lines.append(f"{leaf.name}: a {type(leaf.value).__name__} by {spec!r}")
        return lines

    def _array(self, leaf: NamedArray) -> str:
        value = leaf.value
        line = f"{tuple(value.shape)} {value.dtype} by {self._spec(leaf)}{self._values(value)}"
        if self._copy is False and isinstance(leaf.check(self._mesh, False), CopyError):
            line += ", which cannot be shared"
        return line

    def _spec(self, leaf: NamedArray) -> Any:
        if isinstance(leaf.spec, Plan):
            return leaf.spec
        ndim = len(leaf.shape or ())
        sharding = named_sharding(leaf.spec, self._mesh, ndim, name=leaf.name, sums=True)
        memory = leaf.spec.memory_kind if isinstance(leaf.spec, NamedSharding) else None
        return sharding.spec if memory is None else f"{sharding.spec} in {memory}"

    def _values(self, value: Any) -> str:
        if isinstance(value, jax.ShapeDtypeStruct | Tracer):
            return ""
        self.has_data = True
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return f", sharded as {value.sharding}"
        if isinstance(value, np.ndarray | jax.Array):
            self.has_local_data = True
            return f", values {value_sum(value)}"
        return ""


@cached(256)
def _mesh_line(mesh: Mesh) -> str:
    """A mesh as text; cached, as it may have thousands of devices."""
    return f"mesh {describe_mesh(mesh)} of devices {[device.id for device in mesh.devices.flat]}"
