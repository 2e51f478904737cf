"""Heads that are split: where features lie on more devices than there are heads.

Tensor parallelism over sixteen devices splits the 1,024 features of eight heads of keys into
sixteen. Where they are viewed as eight heads, each lies in two parts, and attention needs it whole.

>>> import jax, jax.numpy as jnp
>>> from .flat_program import flattened
>>> flat = flattened(jax.make_jaxpr(lambda k: k.reshape(4, 8, 16))(jnp.ones((4, 128))))
>>> layouts = ArrayLayouts({"model": 16})
>>> laid = [layouts.known[layouts.of_spec(jax.P(None, "model"), 2)][0], ((), (0, 1, 2), (3,))]
>>> split_heads(flat, layouts, laid)[0].partition(" at ")[0]
"8 heads of 16 are split over 16 devices ('model')"
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from isoshard.core.traced.source_lines import line_of

from .common_expressions import CONSTANT
from .factor_layouts import ArrayLayout, by_factor
from .flat_program import BodyScope, FlatOp, FlatProgram
from .spreading import ArrayLayouts


def split_heads(
    flat: FlatProgram, layouts: ArrayLayouts, laid: Sequence[ArrayLayout]
) -> tuple[str, ...]:
    """Say where heads are split, each kind of heads once.

    Args:
        flat: the program.
        layouts: of the mesh.
        laid: the layout of each value.
    """
    found: dict[tuple[int, int, int, tuple[str, ...]], dict[str, None]] = {}
    for op in _ops(flat.scope):
        if op.name == "reshape" and op.operands[0] != CONSTANT and op.equation is not None:
            axes = op.rule.operands[0]
            factors = axes[-1] if axes else ()
            if len(factors) < 2:
                continue
            layout = laid[op.operands[0]]
            sizes, ways = op.rule.sizes, layouts.sizes
            splits, rest = by_factor(axes, layout, sizes, ways)
            if splits.get(factors[-1]) or rest & set(layout[-1]):
                heads = math.prod(sizes[one] for one in factors[:-1])
                devices = math.prod(ways[one] for one in layout[-1])
                key = (heads, sizes[factors[-1]], devices, layouts.axes(layout[-1]))
                found.setdefault(key, {})[line_of(op.equation)] = None
    return tuple(
        f"{heads} heads of {size} are split over {devices} devices "
        f"({', '.join(map(repr, names))}) at {', '.join(filter(None, lines)) or 'no known line'}: "
        f"{_parts(heads, devices)}, which are gathered where heads are needed whole; a number of "
        f"devices that divides {heads} keeps them whole"
        for (heads, size, devices, names), lines in found.items()
    )


def _parts(heads: int, devices: int) -> str:
    if devices % heads:
        return "some lie in parts"
    return f"each lies in {devices // heads} parts"


def _ops(scope: BodyScope) -> Iterator[FlatOp]:
    for op in scope.ops:
        yield op
        for body in op.bodies:
            yield from _ops(body)
