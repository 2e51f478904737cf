"""Which products a TPU's compiler multiplies part by part while the parts are sent around.

XLA's partitioner can turn a gather of one factor and the product that reads it, or a product of
which each device keeps a slice of the sum, into a loop: multiply what is here, send it on, multiply
what came. libtpu asks it to ("windowed einsum", dot_handler.cc of XLA); the host's compiler does
not. A product is taken apart if

- between 3 and 32 devices talk; here only where their number is divisible by four;
- no other product reads the gathered factor;
- its result is split along all mesh axes, by what is gathered or summed and by its free axes;
- it pays: with `flops` of the product, `bytes` that are gathered or summed, and `n` devices,
  `min(flops / rate, bytes / link)` is more than `2 / n` of `bytes / link`.

The two rates are libtpu's own, as it logs them (`TPU_VMODULE=dot_handler=2`, 0.0.52).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from isoshard.core.runtime.hlo_collectives import Groups, groups_of
from isoshard.core.runtime.hlo_text import ArrayShape, Computation, HloModule, Instruction

from .device_ops import axes_along
from .hlo_costs import costs_of
from .layout_moves import axis_after, is_move
from .target_rewrites import is_sliced
from .varying_axes import Varying, varying_axes

RATES = {
    "v4": (1.37e14, 8.96e10),
    "v5e": (1.97e14, 9.33e10),
    "v5p": (3.94e14, 1.867e11),
    "v6e": (9.18e14, 1.867e11),
}
"""By chip: operations, and bytes of a gathered array, that libtpu counts with in a second."""

_BETWEEN_SLICES = 6e9
"""Bytes in a second that it counts with where devices of several slices talk."""

MOST_DEVICES = 32
_SECONDS = 1e-8
"""Less communication than that is always taken apart."""


@dataclasses.dataclass(frozen=True)
class WindowedProduct:
    """A product and the collective that it is joined with.

    Attributes:
        dot: the product.
        sends: the gather of one of its factors, or the reduction of its result.
        between: names of what stands between the two.
        factor: which factor is gathered, 0 or 1; None: the result is summed.
        inner: whether it is gathered along an axis that is summed over.
        groups: who talks to whom.
        part: what a device has of the factor or keeps of the result.
    """

    dot: Instruction
    sends: Instruction
    between: tuple[str, ...]
    factor: int | None
    inner: bool
    groups: Groups
    part: ArrayShape

    @property
    def count(self) -> int:
        """How many devices talk."""
        return len(self.groups[0])


def windowed_products(
    module: HloModule, mesh: Mesh, given: Sequence[Iterable[str]], chip: str, scaled: str = ""
) -> Mapping[str, tuple[WindowedProduct, ...]]:
    """Find them in the host's program.

    Args:
        module: of one device.
        mesh: over all devices of the program, in their order.
        given: of each argument, the mesh axes that it is split along.
        chip: the name of a TPU.
        scaled: an axis that is smaller in this program than in the one that is planned: whether
            devices along it talk so depends on how many there are.

    Returns:
        By name of a computation those in it; none for a chip whose rates are not known.
    """
    if chip not in RATES:
        return {}
    search = _Search(module, mesh, varying_axes(module, mesh, given), RATES[chip], scaled)
    found = {name: tuple(search.of(one)) for name, one in module.computations.items()}
    return {name: several for name, several in found.items() if several}


class _Search:
    """For products in one program."""

    def __init__(
        self,
        module: HloModule,
        mesh: Mesh,
        varying: Mapping[str, Varying],
        rates: tuple[float, float],
        scaled: str,
    ):
        self.module = module
        self.mesh = mesh
        self.varying = varying
        self.rates = rates
        self.scaled = scaled
        self.slices = [getattr(one, "slice_index", 0) for one in mesh.devices.flat]
        self.all = {name for name, size in mesh.shape.items() if size > 1}

    def of(self, inside: Computation) -> Iterable[WindowedProduct]:
        """The products of one computation."""
        taken = set[str]()
        for one in inside.instructions.values():
            if one.opcode == "all-gather":
                found = self._gathered(inside, one)
            elif one.opcode == "all-reduce":
                found = self._summed(inside, one)
            else:
                continue
            if found is not None and found.dot.name not in taken and self._pays(inside, found):
                taken.add(found.dot.name)
                yield found

    def _gathered(self, inside: Computation, one: Instruction) -> WindowedProduct | None:
        groups = self._groups(one)
        if groups is None:
            return None
        axis: int | None = _numbers(r"\bdimensions=\{([\d,]*)\}", one)[0]
        between = list[str]()
        reader, source = self._only_reader(inside, one), one
        while reader is not None and is_move(self.module, reader):
            axis = None if axis is None else axis_after(self.module, inside, reader, axis)
            between.append(reader.name)
            reader, source = self._only_reader(inside, reader), reader
        if reader is None or reader.opcode != "dot" or axis is None:
            return None
        factor = reader.operands.index(source.name)
        side = ("lhs", "rhs")[factor]
        inner = axis in _numbers(rf"{side}_contracting_dims=\{{([\d,]*)\}}", reader)
        batched = bool(_numbers(r"lhs_batch_dims=\{([\d,]*)\}", reader))
        talking = set(axes_along("all-gather", 0, groups, self.mesh))
        shard, other = self._axes(one.operands[0]), self._axes(reader.operands[1 - factor])
        split = talking <= other and self.all <= shard
        split = split and (inner or batched or talking == self.all)
        if not split or self._is_partial(inside, reader):
            return None
        part = inside.instructions[one.operands[0]].arrays[0]
        return WindowedProduct(reader, one, tuple(between), factor, inner, groups, part)

    def _summed(self, inside: Computation, one: Instruction) -> WindowedProduct | None:
        groups = self._groups(one)
        if groups is None or not is_sliced(self.module, inside, one, len(groups[0])):
            return None
        talking = set(axes_along("all-reduce", 0, groups, self.mesh))
        between = list[str]()
        source = inside.instructions[one.operands[0]]
        while is_move(self.module, source) and len(inside.users[source.name]) == 1:
            between.append(source.name)
            source = inside.instructions[source.operands[0]]
        alone = source.opcode == "dot" and len(inside.users[source.name]) == 1
        if not alone or not self.all <= self._axes(one.name) | talking:
            return None
        part = _slice(self.module, inside, one)
        return WindowedProduct(source, one, tuple(between), None, False, groups, part)

    def _groups(self, one: Instruction) -> Groups | None:
        groups = groups_of(one.text)
        if not groups or len(one.arrays) != 1 or len(one.operands) != 1:
            return None
        if len(groups[0]) % 4 or len(groups[0]) > MOST_DEVICES:
            return None
        return None if self.scaled in axes_along(one.opcode, 0, groups, self.mesh) else groups

    def _only_reader(self, inside: Computation, one: Instruction) -> Instruction | None:
        users = inside.users[one.name]
        if len(users) != 1 or users[0].operands.count(one.name) != 1 or one is inside.root:
            return None
        return users[0]

    def _is_partial(self, inside: Computation, one: Instruction) -> bool:
        """Whether a result is only a term of a sum over devices."""
        return any(
            user.opcode in ("all-reduce", "reduce-scatter")
            or (is_move(self.module, user) and self._is_partial(inside, user))
            for user in inside.users[one.name]
        )

    def _axes(self, name: str) -> frozenset[str]:
        (axes,) = self.varying[name]
        return axes

    def _pays(self, inside: Computation, found: WindowedProduct) -> bool:
        computing, link = self.rates
        if any(len({self.slices[place] for place in group}) > 1 for group in found.groups):
            link = _BETWEEN_SLICES
        sent = found.sends.arrays[0].bytes / link
        least = min(costs_of(self.module, inside, found.dot).flops / computing, sent)
        return sent <= _SECONDS or least > 2 * sent / found.count


def _slice(module: HloModule, inside: Computation, one: Instruction) -> ArrayShape:
    """What is sliced out of a result, of which each device takes a slice."""
    user = inside.users[one.name][0]
    if user.opcode == "dynamic-slice":
        return user.arrays[0]
    if user.opcode == "fusion":
        body = module.computations[user.called[0]]
        return _slice(module, body, body.parameters[user.operands.index(one.name)])
    return _slice(module, inside, user)


def _numbers(pattern: str, one: Instruction) -> list[int]:
    found = re.search(pattern, one.attributes)
    return [int(number) for number in found[1].split(",") if number] if found else []


def summed_size(inside: Computation, dot: Instruction) -> int:
    """How many products of elements are added up for one element of a product.

    Args:
        inside: the computation that it stands in.
        dot: it.
    """
    sizes = inside.instructions[dot.operands[0]].arrays[0].sizes
    axes = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", dot)
    return math.prod(sizes[axis] for axis in axes)
