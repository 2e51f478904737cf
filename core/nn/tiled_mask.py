"""Masks of attention that are computed tile by tile from what they were made of.

A mask of queries by keys is as large as the scores, so an attention that never has all scores must
not have all of its mask either. Most masks are elementwise functions of much less: positions,
document ids, which keys are padding. `tiled_mask` follows the jaxpr that computes a mask back
through elementwise primitives and broadcasts, to *leaves* that are smaller than it; a tile of the
mask is the same function of slices of the leaves.

>>> def packed(ids):                                      # causal, within a document
...     rows, columns = jnp.arange(6)[:, None], jnp.arange(6)
...     return (columns <= rows) & (ids[:, None, :, None] == ids[:, None, None, :])
>>> ids = jnp.array([[0, 0, 0, 1, 1, 1]])
>>> mask = tiled_mask(jax.make_jaxpr(packed)(ids), [ids])
>>> mask.shape, sorted(leaf.size for leaf in mask.leaves)
((1, 1, 6, 6), [6, 6])
>>> mask.tile(Slice(2, 2, 2), Slice(2, 2, 3))[0, 0].tolist()    # queries 2 and 3, keys 2 to 4
[[True, False, False], [False, True, False]]

A value that comes from another primitive is a leaf itself, however large it is: a bias that is
learned, or a mask that was an argument of the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
from isoshard.core.runtime.jaxprs import CALLS, ELEMENTWISE, inlined, opened, replaced

RANK = 4
"""Axes of a mask: batch, heads, queries, keys."""

_ROWS, _COLUMNS = 2, 3
_VIEWS = frozenset(("reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p"))

_Axes = tuple[int | None, ...]
"""Of a value, the axis of the mask that each of its axes is; None where its extent is 1."""


class Slice(NamedTuple):
    """One side of a tile.

    Attributes:
        start: of the tile in the leaves that a device has.
        position: of the tile in the sequence.
        size: elements of the tile.
    """

    start: Any
    position: Any
    size: int


class _Step(NamedTuple):
    """One operation on values of four axes that broadcast.

    Attributes:
        primitive: of JAX; None for positions along an axis, or a number.
        params: of the primitive, sorted by name; of positions the axis and the dtype, of a number
            the value and the dtype.
        operands: indices of leaves, then of results of earlier steps.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    operands: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MaskFunction:
    """How a mask follows from its leaves; hashable.

    Attributes:
        shape: of the mask, four axes.
        dtype: bool, or a float dtype.
        leaves: the shape of each leaf, four axes; an extent is the mask's or 1.
        steps: the operations, in order.
        result: the index of the mask among leaves and results.
    """

    shape: tuple[int, ...]
    dtype: Any
    leaves: tuple[tuple[int, ...], ...]
    steps: tuple[_Step, ...]
    result: int

    def of(self, leaves: Sequence[Any], rows: Slice, columns: Slice) -> jax.Array:
        """The mask of slices of leaves."""
        with jax.enable_x64(True):  # as where the mask was traced: torch's indices have 64 bits
            return self._values(leaves, rows, columns)[self.result]

    def _values(self, leaves: Sequence[Any], rows: Slice, columns: Slice) -> list[Any]:
        values: list[Any] = list(leaves)
        sides = {_ROWS: rows, _COLUMNS: columns}
        for step in self.steps:
            params = dict(step.params)
            if "value" in params and step.primitive is None:
                values.append(jnp.full((1,) * RANK, params["value"], params["dtype"]))
                continue
            if step.primitive is None:
                side = sides[params["axis"]]
                positions = (side.position + jnp.arange(side.size)).astype(params["dtype"])
                shape = [1] * RANK
                shape[params["axis"]] = side.size
                values.append(positions.reshape(shape))
                continue
            operands = jnp.broadcast_arrays(*[values[index] for index in step.operands])
            values.append(step.primitive.bind(*operands, **params))
        return values


@dataclasses.dataclass(frozen=True)
class TiledMask:
    """A mask as a function of its leaves: a pytree, whose leaves these are.

    Attributes:
        function: of the leaves.
        leaves: arrays of four axes.
    """

    function: MaskFunction
    leaves: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch or 1, heads or 1, queries or 1, keys or 1)."""
        return self.function.shape

    @property
    def ndim(self) -> int:
        """Four."""
        return RANK

    @property
    def dtype(self) -> Any:
        """Bool, where True is visible, or that of floats, which are added."""
        return self.function.dtype

    def tile(self, rows: Slice, columns: Slice) -> jax.Array:
        """The mask of some queries and keys.

        Returns:
            An array of four axes; each has the extent of the tile, or 1.
        """
        leaves = [self._slice(leaf, rows, columns) for leaf in self.leaves]
        return self.function.of(leaves, rows, columns)

    def dense(self) -> jax.Array:
        """All of it."""
        sides = (Slice(0, 0, self.shape[axis]) for axis in (_ROWS, _COLUMNS))
        return jnp.broadcast_to(self.tile(*sides), self.shape)

    def _slice(self, leaf: Any, rows: Slice, columns: Slice) -> Any:
        for axis, side in ((_ROWS, rows), (_COLUMNS, columns)):
            if 1 < leaf.shape[axis] != side.size:
                leaf = jax.lax.dynamic_slice_in_dim(leaf, side.start, side.size, axis)
        return leaf


jax.tree_util.register_dataclass(TiledMask, ["leaves"], ["function"])


@dataclasses.dataclass(frozen=True)
class MaskTerms:
    """A mask as kernels take it: the conjunction of what is here.

    Attributes:
        before: how many keys before a query's own position it sees; None for all.
        after: how many after it.
        same: a query sees the keys with its number: [batch or 1, queries] and [batch or 1, keys].
        keys: bool, [batch or 1, keys], the keys that are visible at all.
    """

    before: int | None = None
    after: int | None = None
    same: tuple[jax.Array, jax.Array] | None = None
    keys: jax.Array | None = None

    def within(self, before: int | None, after: int | None) -> MaskTerms:
        """The same, in a window as well."""

        def least(a: int | None, b: int | None) -> int | None:
            return a if b is None else b if a is None else min(a, b)

        window = {"before": least(self.before, before), "after": least(self.after, after)}
        return dataclasses.replace(self, **window)


def mask_terms(mask: TiledMask) -> MaskTerms | None:
    """The terms of a bool mask; None if it is no conjunction of these.

    Example:
        >>> def window(keep):
        ...     rows, columns = jnp.arange(6)[:, None], jnp.arange(6)
        ...     return (columns <= rows) & (columns > rows - 3) & keep
        >>> keep = jnp.array([True] * 5 + [False])
        >>> terms = mask_terms(tiled_mask(jax.make_jaxpr(window)(keep), [keep]))
        >>> terms.before, terms.after, terms.keys.tolist(), terms.same
        (2, 0, [[True, True, True, True, True, False]], None)
    """
    return _Terms(mask).read() if mask.dtype == bool and mask.shape[1] == 1 else None


_SWAPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}


class _Terms:
    """Reads the terms of a mask from its steps."""

    def __init__(self, mask: TiledMask):
        self.mask, self.function = mask, mask.function
        self.result: MaskTerms | None = MaskTerms()

    def read(self) -> MaskTerms | None:
        pending = [self.function.result]
        while pending and self.result is not None:
            index = pending.pop()
            step = self._step(index)
            name = "" if step is None or step.primitive is None else step.primitive.name
            if step and name == "and":
                pending += step.operands
            elif step and name == "select_n" and self._number(step.operands[1]) is False:
                pending += step.operands[::2]
            else:
                self.result = self._term(self.result, index, step)
        return self.result

    def _number(self, index: int) -> Any:
        """The number that a value is; None of any other."""
        step = self._step(index)
        if step is None or step.primitive is not None:
            return None
        return dict(step.params).get("value")

    def _step(self, index: int) -> _Step | None:
        steps = index - len(self.function.leaves)
        return self.function.steps[steps] if steps >= 0 else None

    def _term(self, terms: MaskTerms, index: int, step: _Step | None) -> MaskTerms | None:
        extents = self._extents(index)
        if step is not None and step.primitive is None:
            return terms if self._number(index) is True else None
        name = step.primitive.name if step is not None else ""
        if extents[1] == extents[_ROWS] == 1:
            return self._keys(terms, index, extents)
        if step is not None and name in ("copy", "convert_element_type", "broadcast_in_dim"):
            return self._term(terms, step.operands[0], self._step(step.operands[0]))
        if step is not None and name == "eq" and terms.same is None:
            pair = sorted(step.operands, key=lambda at: self._extents(at)[_COLUMNS])
            shapes = [self._extents(at) for at in pair]
            if [shape[1:] for shape in shapes] == [
                (1, self.mask.shape[_ROWS], 1), (1, 1, self.mask.shape[_COLUMNS])
            ]:  # fmt: skip
                rows, columns = (self._value(at).reshape(n[0], -1) for at, n in
                                 zip(pair, shapes, strict=True))  # fmt: skip
                if jnp.issubdtype(rows.dtype, jnp.integer):
                    return dataclasses.replace(terms, same=(rows, columns))
        if step is not None and name in _SWAPPED:
            sides = [self._linear(at) for at in step.operands]
            if None not in sides:
                return self._order(terms, name, *sides)
        return None

    def _keys(self, terms: MaskTerms, index: int, extents: Any) -> MaskTerms | None:
        keys = jnp.broadcast_to(self._value(index), (*extents[:3], self.mask.shape[_COLUMNS]))
        keys = keys.reshape(extents[0], -1)
        both = keys if terms.keys is None else keys & terms.keys
        return dataclasses.replace(terms, keys=both)

    def _order(self, terms: MaskTerms, name: str, left: Any, right: Any) -> MaskTerms | None:
        """`left <name> right`, of numbers of rows, of columns, and 1."""
        rows, columns, rest = (a - b for a, b in zip(left, right, strict=True))
        if (rows, columns) == (1, -1):
            rows, columns, rest, name = -1, 1, -rest, _SWAPPED[name]
        if (rows, columns) != (-1, 1):  # column - row + rest <name> 0
            return None
        strict = 1 if name in ("lt", "gt") else 0
        if name in ("le", "lt"):
            return terms.within(None, -rest - strict)
        return terms.within(rest - strict, None)

    def _linear(self, index: int) -> tuple[int, int, int] | None:
        """A value as multiples of its row, its column, and 1; None if it is no such sum."""
        step = self._step(index)
        if step is None:
            return None
        params = dict(step.params)
        if step.primitive is None:
            if "axis" in params:
                return (1, 0, 0) if params["axis"] == _ROWS else (0, 1, 0)
            value = params["value"]
            return (
                (0, 0, int(value)) if np.issubdtype(np.asarray(value).dtype, np.integer) else None
            )
        terms = [self._linear(at) for at in step.operands]
        name = step.primitive.name
        if None in terms:
            return None
        if name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.integer):
            return terms[0]
        if name == "mul":
            return _scaled(*terms) or _scaled(*reversed(terms))  # type: ignore
        if name in ("add", "sub"):
            sign = 1 if name == "add" else -1
            a, b = terms
            return tuple(x + sign * y for x, y in zip(a, b, strict=True))  # type: ignore
        return None

    def _extents(self, index: int) -> tuple[int, ...]:
        if index < len(self.mask.leaves):
            return self.mask.leaves[index].shape  # of this device
        step = self._step(index)
        assert step is not None
        if step.primitive is None:
            axis = dict(step.params).get("axis")
            return tuple(self.mask.shape[n] if n == axis else 1 for n in range(RANK))
        shapes = [self._extents(at) for at in step.operands]
        return tuple(max(sizes) for sizes in zip(*shapes, strict=True))

    def _value(self, index: int) -> jax.Array:
        """All of a value."""
        function = dataclasses.replace(self.function, result=index)
        rows, columns = (Slice(0, 0, self.mask.shape[axis]) for axis in (_ROWS, _COLUMNS))
        return function.of(self.mask.leaves, rows, columns)


def _scaled(term: tuple[int, int, int], factor: tuple[int, int, int]) -> Any:
    """A term times another that is a number; None if it is no number."""
    return None if factor[:2] != (0, 0) else tuple(value * factor[2] for value in term)


def tiled_mask(program: Any, arguments: Sequence[Any]) -> TiledMask:
    """A mask by the jaxpr that computes it.

    Args:
        program: a closed jaxpr with one result, the mask, of at most four axes.
        arguments: its inputs.
    """
    program = inlined(program, _called)
    while any(_called(eqn) is not None for eqn in opened(program).eqns):
        program = inlined(program, _called)
    jaxpr = opened(program)
    (mask,) = jaxpr.outvars
    shape = (1,) * (RANK - len(mask.aval.shape)) + tuple(mask.aval.shape)
    axes = tuple(None if n == 1 else RANK - len(mask.aval.shape) + axis
                 for axis, n in enumerate(mask.aval.shape))  # fmt: skip
    walk = _Walk(shape, {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars})
    result = walk.visit(mask, axes)
    function = MaskFunction(shape, mask.aval.dtype, *walk.written(result))
    values = _values(program, [leaf for leaf, _ in walk.leaves], arguments)
    leaves = (_aligned(x, axes) for x, (_, axes) in zip(values, walk.leaves, strict=True))
    return TiledMask(function, tuple(leaves))


class _Walk:
    """Follows a mask to its leaves.

    Args:
        shape: of the mask, four axes.
        makers: the equation of each variable that has one.
    """

    def __init__(self, shape: tuple[int, ...], makers: dict[Any, Any]):
        """Nothing is visited yet."""
        self.shape, self.makers = shape, makers
        self.constant: dict[Any, bool] = {}
        self.leaves: list[tuple[Any, _Axes]] = []
        self.steps: list[tuple[Any, tuple[tuple[str, Any], ...], tuple[Any, ...]]] = []
        self.seen: dict[Any, tuple[str, int]] = {}

    def visit(self, atom: Any, axes: _Axes) -> tuple[str, int]:
        """A value whose axes are those of the mask; returns where it is."""
        key = (id(atom), axes)
        if key not in self.seen:
            self.seen[key] = self._visit(atom, axes)
        return self.seen[key]

    def _visit(self, atom: Any, axes: _Axes) -> tuple[str, int]:
        if hasattr(atom, "val"):
            value = np.asarray(atom.val).item()
            return self._step(None, (("dtype", atom.aval.dtype), ("value", value)), ())
        eqn = self.makers.get(atom)
        if eqn is None or not ({_ROWS, _COLUMNS} <= set(axes) or self._is_constant(atom)):
            return self._leaf(atom, axes)
        name = eqn.primitive.name
        if name in ELEMENTWISE and len(eqn.outvars) == 1:
            operands = [self.visit(x, axes if x.aval.shape else ()) for x in eqn.invars]
            if name in ("copy", "copy_p"):
                return operands[0]
            return self._step(eqn.primitive, tuple(sorted(eqn.params.items())), operands)
        if name == "iota" and axes[eqn.params["dimension"]] in (_ROWS, _COLUMNS):
            params = (("axis", axes[eqn.params["dimension"]]), ("dtype", eqn.params["dtype"]))
            return self._step(None, params, ())
        source = _source_axes(eqn, axes)
        return self._leaf(atom, axes) if source is None else self.visit(eqn.invars[0], source)

    def _is_constant(self, atom: Any) -> bool:
        """Whether a value depends on nothing but numbers and positions."""
        if hasattr(atom, "val"):
            return True
        if atom not in self.constant:
            eqn = self.makers.get(atom)
            self.constant[atom] = eqn is not None and all(map(self._is_constant, eqn.invars))
        return self.constant[atom]

    def _leaf(self, atom: Any, axes: _Axes) -> tuple[str, int]:
        self.leaves.append((atom, axes))
        return "leaf", len(self.leaves) - 1

    def _step(self, primitive: Any, params: Any, operands: Sequence[Any]) -> tuple[str, int]:
        self.steps.append((primitive, params, tuple(operands)))
        return "step", len(self.steps) - 1

    def written(self, result: tuple[str, int]) -> tuple[Any, Any, int]:
        """Shapes of leaves, steps, and the index of the result."""
        shapes = tuple(_extents(leaf.aval.shape, axes) for leaf, axes in self.leaves)
        begin = {"leaf": 0, "step": len(shapes)}
        steps = tuple(
            _Step(primitive, params, tuple(begin[kind] + index for kind, index in operands))
            for primitive, params, operands in self.steps
        )
        return shapes, steps, begin[result[0]] + result[1]


def _source_axes(eqn: Any, axes: _Axes) -> _Axes | None:
    """The axes of the operand of an equation that only moves axes; None of any other."""
    name, operand = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
    if operand is None or len(eqn.invars) != 1:
        return None
    shape, result = operand.aval.shape, eqn.outvars[0].aval.shape
    if name == "broadcast_in_dim":
        targets = eqn.params["broadcast_dimensions"]
        return tuple(
            axes[to] if n == result[to] else None for n, to in zip(shape, targets, strict=True)
        )
    if name == "transpose":
        source: list[int | None] = [None] * len(shape)
        for axis, own in zip(axes, eqn.params["permutation"], strict=True):
            source[own] = axis
        return tuple(source)
    kept = [(n, axis) for n, axis in zip(result, axes, strict=True) if n != 1]
    if name in _VIEWS and [n for n, _ in kept] == [n for n in shape if n != 1]:
        rest = iter(axis for _, axis in kept)
        return tuple(None if n == 1 else next(rest) for n in shape)
    return None


def _called(eqn: Any) -> Any:
    body = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    return body if body is not None and not getattr(body, "consts", ()) else None


def _values(program: Any, atoms: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The values of atoms of a program."""
    variables = list(dict.fromkeys(atoms))
    with jax.enable_x64(True):
        values = jaxpr_as_fun(replaced(program, outvars=variables))(*arguments)
    value_of = dict(zip(variables, values, strict=True))
    return [value_of[atom] for atom in atoms]


def _extents(shape: tuple[int, ...], axes: _Axes) -> tuple[int, ...]:
    extents = [1] * RANK
    for n, axis in zip(shape, axes, strict=True):
        if axis is not None:
            extents[axis] = n
    return tuple(extents)


def _aligned(x: jax.Array, axes: _Axes) -> jax.Array:
    """A value with the four axes of the mask."""
    order = np.argsort([RANK if axis is None else axis for axis in axes], kind="stable")
    return jnp.transpose(x, order.tolist()).reshape(_extents(x.shape, axes))
