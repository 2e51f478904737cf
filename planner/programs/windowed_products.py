"""Windowed einsums: products that a TPU's compiler multiplies in a loop while it sends shards.

XLA's partitioner can turn a gather of one factor and the product that reads it, or a product of
which each device keeps a slice of the sum, into a loop: multiply the local shard, send it on,
multiply the received one. libtpu enables that ("windowed einsum", dot_handler.cc of XLA); the
host's compiler does not. A product becomes a loop if

- its groups have 3 to 32 devices; here only multiples of four;
- no other product reads the gathered factor;
- its result is split along all mesh axes, by those gathered or summed and by its free axes;
- it pays: with `flops` of the product, `bytes` that are gathered or summed, and `n` devices,
  `min(flops / rate, bytes / link)` is more than `2 / n` of `bytes / link`.

The two rates are libtpu's own, as it logs them (`TPU_VMODULE=dot_handler=2`, 0.0.52).

Each of `n` devices sends to both neighbours, so one iteration takes two steps each way, four shards
of `n`. With four devices there is one iteration, and no loop: its last send is dropped, and where
several sums start from equal zeros, these are sent once.

A loop carries the local shard and the one received the other way; of a gather also the result and,
if it is summed, one more of its size; of a sum its two halves.

Source: `EmitWindowedDotGeneral` of XLA's dot_handler.cc, and programs that libtpu compiled.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from isoshard.core.kit import (
    ArrayShape,
    Computation,
    Groups,
    HloModule,
    Instruction,
    groups_of,
    instructions,
)

from .collective_rewrites import is_sliced
from .device_ops import WINDOWED, collective_axes
from .hlo_costs import costs_of
from .hlo_layouts import axis_after, is_move
from .varying_axes import Varying, varying_axes

RATES = {
    "v4": (1.37e14, 8.96e10),
    "v5e": (1.97e14, 9.33e10),
    "v5p": (3.94e14, 1.867e11),
    "v6e": (9.18e14, 1.867e11),
}
"""By chip: libtpu's flops, and bytes of a gathered array, a second."""

_BETWEEN_SLICES = 6e9
"""libtpu's bytes a second of a collective between slices."""

MOST_DEVICES = 32
_SECONDS = 1e-8
"""Products with less communication than that always become loops."""


@dataclasses.dataclass(frozen=True)
class WindowedProduct:
    """A product and the collective of its loop.

    Attributes:
        dot: the product.
        sends: the gather of one of its factors, or the reduction of its result.
        between: names of the instructions between the two.
        factor: which factor is gathered, 0 or 1; None: the result is summed.
        inner: whether it is gathered along a contracted axis.
        groups: of the collective.
        shard: of the factor or of the result.
    """

    dot: Instruction
    sends: Instruction
    between: tuple[str, ...]
    factor: int | None
    inner: bool
    groups: Groups
    shard: ArrayShape

    @property
    def count(self) -> int:
        """The devices of a group."""
        return len(self.groups[0])


def windowed_products(
    module: HloModule, mesh: Mesh, arguments: Sequence[Iterable[str]], chip: str, scaled: str = ""
) -> Mapping[str, tuple[WindowedProduct, ...]]:
    """Find the windowed products of the host's program.

    Args:
        module: of one device.
        mesh: over all devices of the program, in their order.
        arguments: of each argument, the mesh axes that it is split along.
        chip: the name of a TPU.
        scaled: an axis that is smaller in this program than in the planned one: whether products
            along it become loops depends on its size.

    Returns:
        By name of their computation; empty for a chip whose rates are not known.
    """
    if chip not in RATES:
        return {}
    search = _Search(module, mesh, varying_axes(module, mesh, arguments), RATES[chip], scaled)
    result = {
        name: tuple(search.of(computation)) for name, computation in module.computations.items()
    }
    return {name: several for name, several in result.items() if several}


class _Search:
    """The search for windowed products in one program."""

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
        self.slices = [getattr(leaf, "slice_index", 0) for leaf in mesh.devices.flat]
        self.all = {name for name, size in mesh.shape.items() if size > 1}

    def of(self, inside: Computation) -> Iterable[WindowedProduct]:
        """The products of one computation."""
        taken = set[str]()
        for row in inside.instructions.values():
            if row.opcode == "all-gather":
                gathered = self._gathered(inside, row)
            elif row.opcode == "all-reduce":
                gathered = self._summed(inside, row)
            else:
                continue
            if (
                gathered is not None
                and gathered.dot.name not in taken
                and self._pays(inside, gathered)
            ):
                taken.add(gathered.dot.name)
                yield gathered

    def _gathered(self, inside: Computation, row: Instruction) -> WindowedProduct | None:
        groups = self._groups(row)
        if groups is None:
            return None
        axis: int | None = _indices(r"\bdimensions=\{([\d,]*)\}", row)[0]
        between = list[str]()
        reader, source = self._only_reader(inside, row), row
        while reader is not None and is_move(self.module, reader):
            axis = None if axis is None else axis_after(self.module, inside, reader, axis)
            between.append(reader.name)
            reader, source = self._only_reader(inside, reader), reader
        if reader is None or reader.opcode != "dot" or axis is None:
            return None
        factor = reader.operands.index(source.name)
        side = ("lhs", "rhs")[factor]
        inner = axis in _indices(rf"{side}_contracting_dims=\{{([\d,]*)\}}", reader)
        batched = bool(_indices(r"lhs_batch_dims=\{([\d,]*)\}", reader))
        talking = set(collective_axes("all-gather", 0, groups, self.mesh))
        shard, other = self._axes(row.operands[0]), self._axes(reader.operands[1 - factor])
        split = talking <= other and self.all <= shard
        split = split and (inner or batched or talking == self.all)
        if not split or self._is_partial(inside, reader):
            return None
        gathered = inside.instructions[row.operands[0]].arrays[0]
        return WindowedProduct(reader, row, tuple(between), factor, inner, groups, gathered)

    def _summed(self, inside: Computation, row: Instruction) -> WindowedProduct | None:
        groups = self._groups(row)
        if groups is None or not is_sliced(self.module, inside, row, len(groups[0])):
            return None
        talking = set(collective_axes("all-reduce", 0, groups, self.mesh))
        between = list[str]()
        source = inside.instructions[row.operands[0]]
        while is_move(self.module, source) and len(inside.users[source.name]) == 1:
            between.append(source.name)
            source = inside.instructions[source.operands[0]]
        alone = source.opcode == "dot" and len(inside.users[source.name]) == 1
        if not alone or not self.all <= self._axes(row.name) | talking:
            return None
        summed = _slice(self.module, inside, row)
        return WindowedProduct(source, row, tuple(between), None, False, groups, summed)

    def _groups(self, row: Instruction) -> Groups | None:
        groups = groups_of(row.text)
        if not groups or len(row.arrays) != 1 or len(row.operands) != 1:
            return None
        if len(groups[0]) % 4 or len(groups[0]) > MOST_DEVICES:
            return None
        return None if self.scaled in collective_axes(row.opcode, 0, groups, self.mesh) else groups

    def _only_reader(self, inside: Computation, row: Instruction) -> Instruction | None:
        users = inside.users[row.name]
        if len(users) != 1 or users[0].operands.count(row.name) != 1 or row is inside.root:
            return None
        return users[0]

    def _is_partial(self, inside: Computation, row: Instruction) -> bool:
        """Whether a result is only a term of a sum over devices."""
        return any(
            user.opcode in ("all-reduce", "reduce-scatter")
            or (is_move(self.module, user) and self._is_partial(inside, user))
            for user in inside.users[row.name]
        )

    def _axes(self, name: str) -> frozenset[str]:
        (axes,) = self.varying[name]
        return axes

    def _pays(self, inside: Computation, result: WindowedProduct) -> bool:
        computing, link = self.rates
        if any(len({self.slices[index] for index in group}) > 1 for group in result.groups):
            link = _BETWEEN_SLICES
        pays = result.sends.arrays[0].bytes / link
        least = min(costs_of(self.module, inside, result.dot).flops / computing, pays)
        return pays <= _SECONDS or least > 2 * pays / result.count


def _slice(module: HloModule, inside: Computation, row: Instruction) -> ArrayShape:
    """The slice that each device takes of a result."""
    user = inside.users[row.name][0]
    if user.opcode == "dynamic-slice":
        return user.arrays[0]
    if user.opcode == "fusion":
        body = module.computations[user.called[0]]
        return _slice(module, body, body.parameters[user.operands.index(row.name)])
    return _slice(module, inside, user)


def _indices(pattern: str, row: Instruction) -> list[int]:
    match = re.search(pattern, row.attributes)
    return [int(index) for index in match[1].split(",") if index] if match else []


def contracted_size(inside: Computation, dot: Instruction) -> int:
    """The product of a dot's contracted sizes."""
    sizes = inside.instructions[dot.operands[0]].arrays[0].sizes
    axes = _indices(r"lhs_contracting_dims=\{([\d,]*)\}", dot)
    return math.prod(sizes[axis] for axis in axes)


_TEST = "windowed_dot_general_cond"
_AT_ONCE = 4
"""Shards that one iteration multiplies."""


def rewrite_windowed(
    module: HloModule, products: Mapping[str, Sequence[WindowedProduct]]
) -> HloModule:
    """The program with its windowed products as loops.

    Args:
        module: the host's, its instructions in any order.
        products: by name of a computation; see `windowed_products`.
    """
    if not products:
        return module
    computations = dict(module.computations)
    for name, several in products.items():
        changed = _Rewriting(computations[name], several)
        computations[name] = changed.computation()
        computations |= changed.bodies
    computations[_TEST] = _computation(_TEST, "%more = pred[] parameter(0)")
    entry = computations[module.entry.name]
    return dataclasses.replace(module, computations=computations, entry=entry)


class _Rewriting:
    """Rewrites one computation."""

    def __init__(self, inside: Computation, products: Sequence[WindowedProduct]):
        self.inside = inside
        self.products = {product.dot.name: product for product in products}
        self.sums = {product.sends.name: product for product in products if product.factor is None}
        self.dropped = {name for product in products for name in product.between}
        self.dropped |= {product.sends.name for product in products} - set(self.sums)
        self.bodies: dict[str, Computation] = {}
        self.zeros: dict[str, str] = {}

    def computation(self) -> Computation:
        """The rewritten computation."""
        rows: dict[str, Instruction] = {}
        for row in self.inside.instructions.values():
            if row.name in self.products:
                rows |= self._product(self.products[row.name])
            elif row.name in self.sums:
                # All readers take this device's slice of the sum, which is all that is computed.
                of = self.sums[row.name].dot.name
                rows |= instructions(f"%{row.name} = {row.shape} bitcast(%{of})")
            elif row.name not in self.dropped:
                rows[row.name] = row
        return Computation(self.inside.name, rows, rows[self.inside.root.name])

    def _product(self, result: WindowedProduct) -> dict[str, Instruction]:
        text = _Text(self.inside, result)
        if result.count > _AT_ONCE:
            before, body, after = text.loop()
            computation = _computation(text.body, body)
            self.bodies[computation.name] = computation
            return instructions(before + after)
        if result.factor is not None:
            return instructions(text.gathered())
        kind = f"{text.shard_shape} {text.onward}"
        zeros = self.zeros.setdefault(kind, text.name)
        return instructions(text.summed(zeros))


class _Text:
    """The HLO text of one windowed product."""

    def __init__(self, inside: Computation, product: WindowedProduct):
        dot, count = product.dot, product.count
        self.name = dot.name
        self.body = f"{WINDOWED}.{dot.name}"
        self.product = product
        pairs = [(g[at], g[(at + 1) % count]) for g in product.groups for at in range(count)]
        self.onward = _pairs(pairs)
        self.backward = _pairs([(target, source) for source, target in pairs])
        _, mark, rest = dot.attributes.partition("metadata={")
        self.metadata = f", {mark}{rest}" if mark else ""
        full, summed = dot.arrays[0], contracted_size(inside, dot)
        size = math.prod(full.sizes)
        self.full_shape = _shape(full, *full.sizes)
        self.shard_shape = _shape(product.shard, *product.shard.sizes)
        factors = [inside.instructions[name].arrays[0] for name in dot.operands]
        shapes = [_shape(factor, *factor.sizes) for factor in factors]
        index = 0 if product.factor is None else 1 - product.factor
        self.other, other = dot.operands[index], factors[index]
        rows, columns = summed, math.prod(other.sizes) // summed
        if product.factor is None:
            self.local_name = dot.operands[1]
            self.carry_shapes = [*shapes, self.shard_shape, self.shard_shape]
            columns = columns * 2 // count
        else:
            self.local_name = product.sends.operands[0]
            self.carry_shapes = [shapes[index], self.shard_shape, self.full_shape, self.shard_shape]
            rows = rows * 2 // count if product.inner else rows
        # The operand of two shards, the contracted axis first; and their result.
        self.operand_shape = _shape(other, rows, columns)
        self.result_shape = _shape(full, size if product.inner else size * 2 // count)

    def gathered(self) -> str:
        """With four devices, each with a shard of a factor."""
        buffer = (
            "" if self.product.inner else f"%{self.name}.whole = {self.full_shape} broadcast()\n"
        )
        came = f"{self.name}.came"
        into = "" if self.product.inner else f"{self.name}.whole"
        gathered = self._send(came, self.local_name, self.onward)
        return (
            buffer
            + gathered
            + self._two_gathered(self.other, self.local_name, came, into, self.name)
        )

    def summed(self, zeros: str) -> str:
        """With four devices, each with a shard of the sum.

        Args:
            zeros: name of the product whose zeros are sent; others of its kind use the same.
        """
        text = ""
        if zeros == self.name:
            text = f"%{zeros}.zeros = {self.shard_shape} broadcast()\n" + self._send_both(
                f"{zeros}.sent", f"{zeros}.zeros", f"{zeros}.zeros"
            )
        text += self._two_summed(self.other, self.local_name, f"{zeros}.sent")
        return text + self._joined(f"{self.name}.odd.back", f"{self.name}.odd.on")

    def loop(self) -> tuple[str, str, str]:
        """With more devices: the text before the loop, its body, and the text after it."""
        name, carry = self.name, f"({', '.join(self.carry_shapes)})"
        other, current, third, fourth = carry_names = [f"{name}.in.{at}" for at in range(4)]
        body = f"%{name}.in = {carry} parameter(0)\n"
        body += "".join(
            _element(element, f"{name}.in", at, self.carry_shapes)
            for at, element in enumerate(carry_names)
        )
        if self.product.factor is None:
            before = "".join(
                f"%{name}.zeros.{at} = {self.shard_shape} broadcast()\n" for at in (2, 3)
            )
            start = f"%{self.other}, %{self.local_name}, %{name}.zeros.2, %{name}.zeros.3"
            body += self._send_both(f"{name}.sent", third, fourth)
            body += self._two_summed(other, current, f"{name}.sent")
            end = f"%{other}, %{current}, %{name}.odd.back, %{name}.odd.on"
        else:
            before = self._send(f"{name}.came", self.local_name, self.onward)
            before += f"%{name}.whole = {self.full_shape} broadcast()\n"
            start = f"%{self.other}, %{self.local_name}, %{name}.whole, %{name}.came"
            body += self._two_gathered(other, current, fourth, third, f"{name}.sum")
            body += self._send_both(f"{name}.out", f"{name}.next.back", f"{name}.next.on")
            end = f"%{other}, %{name}.out.back, %{name}.sum, %{name}.out.on"
        body += f"ROOT %{name}.end = {carry} tuple({end})"
        trip_count = (
            f'backend_config={{"known_trip_count":{{"n":"{self.product.count // _AT_ONCE}"}}}}'
        )
        before += f"%{name}.start = {carry} tuple({start})\n"
        before += (
            f"%{name}.loop = {carry} while(%{name}.start), condition=%{_TEST}, body=%{self.body}, "
            f"{trip_count}{self.metadata}\n"
        )
        results = [
            _element(f"{name}.left.{at}", f"{name}.loop", at, self.carry_shapes) for at in (2, 3)
        ]
        if self.product.factor is None:
            return before, body, "".join(results) + self._joined(f"{name}.left.2", f"{name}.left.3")
        return before, body, _element(name, f"{name}.loop", 2, self.carry_shapes)

    def _two_gathered(self, other: str, current: str, came: str, into: str, result: str) -> str:
        """Two steps; the next shards are named `NAME.next.back` and `NAME.next.on`."""
        name = self.name
        text = f"%{name}.read = {self.operand_shape} bitcast(%{other})\n"
        text += self._multiply(f"{name}.even", self.result_shape, f"%{current}, %{came}")
        text += self._send_both(f"{name}.next", current, came)
        two_gathered = f"%{name}.next.back, %{name}.next.on"
        if self.product.inner:
            added = f"%{into}, %{name}.even" if into else f"%{name}.even"
            over = ", output_to_operand_aliasing={{}: (3, {})}, "
            return text + self._multiply(result, self.full_shape, f"{two_gathered}, {added}", over)
        text += f"%{name}.half = {self.full_shape} dynamic-update-slice(%{into}, %{name}.even)\n"
        text += self._multiply(f"{name}.odd", self.result_shape, two_gathered)
        odd = f"dynamic-update-slice(%{name}.half, %{name}.odd){self.metadata}\n"
        return text + f"%{result} = {self.full_shape} {odd}"

    def _two_summed(self, left: str, right: str, received: str) -> str:
        """Two steps, from the shards `RECEIVED.back` and `RECEIVED.on` to those of `NAME.odd`."""
        name, text = self.name, f"%{self.name}.read = {self.operand_shape} bitcast(%{left})\n"
        for step in ("even", "odd"):
            text += self._multiply(f"{name}.{step}", self.result_shape, f"%{right}")
            for way in ("back", "on"):
                added = f"add(%{received}.{way}, %{name}.{step}){self.metadata}"
                text += f"%{name}.{step}.{way} = {self.shard_shape} {added}\n"
            if step == "even":
                received = f"{name}.next"
                text += self._send_both(received, f"{name}.even.back", f"{name}.even.on")
        return text

    def _joined(self, back: str, onward: str) -> str:
        """The sum of the product's two halves."""
        text = self._send(f"{self.name}.last", onward, self.onward)
        return (
            text
            + f"%{self.name} = {self.shard_shape} add(%{back}, %{self.name}.last){self.metadata}\n"
        )

    def _multiply(self, name: str, shape: str, with_: str, over: str = "") -> str:
        read = f"%{self.name}.read, {with_}"
        return f"%{name} = {shape} dot({read}), lhs_contracting_dims={{0}}{over}{self.metadata}\n"

    def _send_both(self, name: str, back: str, onward: str) -> str:
        send_both = self._send(f"{name}.back", back, self.backward)
        return send_both + self._send(f"{name}.on", onward, self.onward)

    def _send(self, name: str, operand: str, pairs: str) -> str:
        return (
            f"%{name} = {self.shard_shape} collective-permute(%{operand}), {pairs}{self.metadata}\n"
        )


def _shape(like: ArrayShape, *sizes: int) -> str:
    return f"{like.dtype}[{','.join(map(str, sizes))}]"


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    return f"source_target_pairs={{{','.join(f'{{{a},{b}}}' for a, b in pairs)}}}"


def _element(name: str, of: str, at: int, shapes: Sequence[str]) -> str:
    return f"%{name} = {shapes[at]} get-tuple-element(%{of}), index={at}\n"


def _computation(name: str, text: str) -> Computation:
    rows = instructions(text)
    return Computation(name, rows, list(rows.values())[-1])
