"""Places of views that change from run to run, as inputs of the program.

In `for i in range(20): step(data[i])` each `i` is another view chain, and so another program. Here
the second of these finds that it is the first but for a place, and becomes a program that takes the
place as a number, as it takes a learning rate; it serves all that follow. What does not change
(the layers of a stacked weight) is static, and so is a program that is run again as it was.

What may move is what costs nothing more at a place that is not known:

- on one device every index and slice, read or written, and the gradient of each;
- on a mesh those of an input along an unsharded axis, and writes of one index,
  which every device chooses among its own. An axis that is split is static: to read from it at a
  place that is not known, XLA would gather it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from isoshard.core.runtime.caches import CALLS, PROGRAMS, Bounded, Interned
from isoshard.torch_bridge._torch_internals import schema_of
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.engine.recording.lazy_tensor import WrittenView, reading
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.engine.values import dynamic_views, sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.engine.values.views import Chain, ViewOp

from .compile_request import CompileRequest
from .plan_lowering import layouts_in

Axes = tuple[bool, ...]
"""Of each axis whether it is unsharded."""


@dataclasses.dataclass
class _Mover:
    """An entry with places that may move.

    Attributes:
        form: what it computes, without the places.
        starts: the places.
        recipes: what computes it, one after the other, where some of the places are numbers.
    """

    form: tuple[Any, ...]
    starts: tuple[int, ...]
    recipes: Callable[[tuple[bool, ...]], list[Recipe]]


@dataclasses.dataclass
class _SeenIndices:
    """Programs that are one but for the places of views.

    Attributes:
        starts: the places of the first.
        moved: numbers of those that another one had elsewhere.
    """

    starts: tuple[int, ...]
    moved: set[int] = dataclasses.field(default_factory=set[int])


_SEEN_INDICES: Bounded[Any, _SeenIndices] = Bounded(PROGRAMS, "engine: indices that change")
_RECIPES: Interned[Any, Recipe] = Interned(CALLS, "engine: recipes of indices that change")
_NOTING = threading.Lock()


def with_dynamic_indices(
    plan: CompileRequest, lean: CompileRequest, scalars: Sequence[Any]
) -> tuple[CompileRequest, Sequence[Any]]:
    """A plan whose moving places are inputs, if there are any."""
    movers = _movers(lean)
    if not movers:
        return plan, scalars
    starts = tuple([start for mover in movers.values() for start in mover.starts])
    entries: list[Any] = list(lean.program)
    for index, mover in movers.items():
        entries[index] = (mover.form, *entries[index][1:])
    key = dataclasses.replace(lean, program=tuple(entries)).key()
    with _NOTING:
        seen = _SEEN_INDICES.get(key)
        if seen is None:
            seen = _SEEN_INDICES[key] = _SeenIndices(starts)
        first = seen.starts
        seen.moved.update(n for n in range(len(first)) if starts[n] != first[n])
        moved = set(seen.moved)
    return _taking(lean, scalars, movers, moved) if moved else (plan, scalars)


def is_only_moved(recipe: Recipe, other: Recipe) -> bool:
    """Whether two recipes of views differ in nothing but a place."""
    forms = [_everywhere(recipe) for recipe in (recipe, other)]
    return None not in forms and forms[0] == forms[1]


def _everywhere(recipe: Recipe) -> Any:
    mover = _mover(recipe, None, alone=True)
    return None if mover is None else mover.form


def _taking(
    plan: CompileRequest, scalars: Sequence[Any], movers: dict[int, _Mover], moved: set[int]
) -> tuple[CompileRequest, list[Any]]:
    """The plan with some of its places as lifted floats, and all of these."""
    entries: list[Any] = []
    slots: list[int] = []  # of the new plan, by those of the old one
    floats: list[Any] = []
    slot = taken = passed = 0
    recipes: set[Recipe] = set()
    sources: list[int] = []  # of each entry of the new plan, the one of the old plan
    for index, entry in enumerate(plan.program):
        if not isinstance(entry[0], int):
            entries.append(entry)
            sources.append(index)
            slots.append(slot)
            slot += 1
            continue
        recipe, inputs = RECIPES[entry[0]], [slots[slot] for slot in entry[1:]]
        floats += scalars[taken : taken + recipe.lifted]
        taken += recipe.lifted
        chain = [recipe]
        if index in movers:
            mover = movers[index]
            lifted = range(passed, passed + len(mover.starts))
            passed = lifted.stop
            chosen = tuple([index in moved for index in lifted])
            floats += [start for start, moves in zip(mover.starts, chosen, strict=True) if moves]
            chain = mover.recipes(chosen) if any(chosen) else chain
        for recipe in chain:
            recipes.add(recipe)
            entries.append((recipe.id, *inputs))
            sources.append(index)
            inputs = [slot]
            slot += recipe.count
        slots += range(slot - chain[-1].count, slot)
    new = dataclasses.replace(
        plan,
        program=tuple(entries),
        leaves=tuple([slots[slot] for slot in plan.leaves]),
        live=tuple([slots[slot] for slot in plan.live]),
        lifted=len(floats),
        recipes=frozenset(recipes),
        moved=len(moved),
        notes=plan.notes and plan.notes.chosen(sources),
    )
    return new, floats


def _movers(plan: CompileRequest) -> dict[int, _Mover]:
    """The entries with places that may move, by their own places in the program."""
    alone = all(len(sharding_ids.devices(layout)) == 1 for layout in layouts_in(plan))
    movers: dict[int, _Mover] = {}
    axes: list[Axes | None] = []  # of each slot; None where it is XLA that decides
    placed = iter(plan.placed)
    for index, entry in enumerate(plan.program):
        if not isinstance(entry[0], int):
            axes.append(_unsharded_axes(next(placed), len(entry[0])))
            continue
        recipe = RECIPES[entry[0]]
        its = axes[entry[1]] if len(entry) > 1 else None
        mover = _mover(recipe, its, alone=alone)
        if mover is not None and mover.starts:
            movers[index] = mover
        keeps_layout = isinstance(recipe.detail, WrittenView)  # memory keeps its layout
        axes += [its if keeps_layout else None] * recipe.count
    return movers


def _unsharded_axes(index: int, rank: int) -> Axes:
    """Of each axis of an input whether its layout leaves it unsharded."""
    sharding = None if index == sharding_ids.UNPLACED else sharding_ids.sharding(index)
    if sharding is None or len(sharding.device_set) == 1 or sharding.is_fully_replicated:
        return (True,) * rank
    if not isinstance(sharding, NamedSharding):
        return (False,) * rank
    return tuple([names is None for names in (*sharding.spec, *[None] * rank)][:rank])


def _mover(recipe: Recipe, axes: Axes | None, *, alone: bool) -> _Mover | None:
    """An entry's places that may move; None if it can have none."""
    detail = recipe.detail
    if isinstance(detail, Chain):
        return _read(detail, _free(detail.ops, axes, alone))
    if isinstance(detail, WrittenView) and dynamic_views.can_write(detail.chain.ops):
        ops = detail.chain.ops
        last = len(ops) - 1  # is written to, and not read
        indices = [*_free(ops[:last], axes, alone), last]
        return _written(detail.chain, [n for n in indices if _puts(ops[n], alone)])
    if recipe.name in ("aten::select_backward", "aten::slice_backward"):
        return _gradient(recipe, alone)
    return None


def _free(ops: Sequence[ViewOp], axes: Axes | None, alone: bool) -> list[int]:
    """The operations of a view that may have their places anywhere."""
    if alone or (axes is not None and all(axes)):
        return [index for index, op in enumerate(ops) if dynamic_views.split_start(op) is not None]
    result: list[int] = []
    left = list(axes or ())
    for index, op in enumerate(ops):
        if axes is None or op[0] not in ("index", "slice", "permute"):
            break
        if op[0] == "permute":
            left = [left[axis] for axis in op[1]]
            continue
        if left[op[1]] and dynamic_views.split_start(op) is not None:
            result.append(index)
        if op[0] == "index":
            del left[op[1]]
    return result


def _puts(op: ViewOp, alone: bool) -> bool:
    """Whether something can be put to a place of an operation that is not known."""
    split = dynamic_views.split_start(op)
    if split is None:
        return False
    return dynamic_views.is_single(split[0]) or (alone and split[0][-1] == 1)


def _split_starts(
    ops: Sequence[ViewOp], indices: Sequence[int]
) -> tuple[tuple[ViewOp, ...], list[int]]:
    """The operations of a view, some without their places; and these places."""
    new, starts = list(ops), list[int]()
    for index in indices:
        split = dynamic_views.split_start(ops[index])
        assert split is not None
        new[index] = split[0]
        starts.append(split[1])
    return tuple(new), starts


def _interned(key: tuple[Any, ...], name: str, run: Callable[..., Any], lifted: int) -> Recipe:
    recipe = _RECIPES.lookup(key)
    return recipe or _RECIPES.intern(key, Recipe(name, run, 1, lifted=lifted))


def _read(chain: Chain, indices: list[int]) -> _Mover:
    base = chain.base

    def recipes(chosen: tuple[bool, ...]) -> list[Recipe]:
        moving = [index for index, moves in zip(indices, chosen, strict=True) if moves]
        count = moving[-1] + 1
        ops, _ = _split_starts(chain.ops[:count], moving)
        first = _interned(
            ("view", base, ops),
            "view",
            lambda arrays, starts, _key: [dynamic_views.read(ops, base, arrays[0], starts)],
            len(moving),
        )
        before = Chain.root(base)
        for op in chain.ops[:count]:
            before = before.then(op)
        # What follows remains a chain, which products look through (`rewrites.py`).
        after = Chain.root(Aval.contiguous(before.size, base.meta.dtype))
        for op in chain.ops[count:]:
            after = after.then(op)
        return [first, reading(after)] if after.ops else [first]

    form, starts = _split_starts(chain.ops, indices)
    return _Mover(("view", base, form), tuple(starts), recipes)


def _written(chain: Chain, indices: list[int]) -> _Mover:
    base = chain.base

    def recipes(chosen: tuple[bool, ...]) -> list[Recipe]:
        moving = [index for index, moves in zip(indices, chosen, strict=True) if moves]
        ops, _ = _split_starts(chain.ops, moving)

        def run(arrays: Sequence[Any], starts: Sequence[Any], _key: Any) -> list[Any]:
            return [dynamic_views.write(ops, base, arrays[0], arrays[1], starts)]

        return [_interned(("write", base, ops), "write", run, len(moving))]

    form, starts = _split_starts(chain.ops, indices)
    return _Mover(("write", base, form), tuple(starts), recipes)


def _gradient(recipe: Recipe, alone: bool) -> _Mover | None:
    """The gradient of an index or a slice: a write into zeros."""
    call = recipe.detail
    names = [argument.name for argument in schema_of(call.op).arguments]
    named = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    size = tuple(named["input_sizes"])
    dim = named["dim"] % max(len(size), 1)
    if recipe.name == "aten::select_backward":
        op: ViewOp = ("index", dim, named["index"] % size[dim])
    else:
        start, stop, step = slice(named["start"], named["end"], named["step"]).indices(size[dim])
        op = ("slice", dim, start, stop, step)
    split = dynamic_views.split_start(op)
    if split is None or not _puts(op, alone):
        return None
    form, start = split
    dtype = physical_dtype(call.outs[0].dtype)
    key = (recipe.name, size, dtype, form)

    def run(arrays: Sequence[Any], starts: Sequence[Any], _key: Any) -> list[Any]:
        return [dynamic_views.put_at(form, jnp.zeros(size, dtype), arrays[0], starts[0])]

    return _Mover(key, (start,), lambda _chosen: [_interned(key, recipe.name, run, 1)])
