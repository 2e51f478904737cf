"""Rewrite products as a TPU's compiler multiplies them, part by part while parts are sent around.

Of `n` devices each sends to both neighbours, so one run of the loop takes two steps of each way,
four parts of `n`. With four devices the loop runs once, and then it is none: what it would send
last is left out, and where several sums start from equal zeros, these are sent once.

A loop keeps the part that is here and the one that came the other way; of a gather also the result
and, if it is added up, one more of its size; of a sum its two halves.

Source: `EmitWindowedDotGeneral` of XLA's dot_handler.cc, and programs that libtpu compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from isoshard.core.runtime.hlo_text import (
    ArrayShape,
    Computation,
    HloModule,
    Instruction,
    instructions,
)

from .device_ops import WINDOWED
from .windowed_products import WindowedProduct, summed_size

_TEST = "windowed_dot_general_cond"
_AT_ONCE = 4
"""Parts that one run of a loop multiplies."""


def multiplied_by_parts(
    module: HloModule, products: Mapping[str, Sequence[WindowedProduct]]
) -> HloModule:
    """The same program with some products as such loops.

    Args:
        module: the host's, in whatever order its instructions stand.
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
    """Of one computation."""

    def __init__(self, inside: Computation, products: Sequence[WindowedProduct]):
        self.inside = inside
        self.products = {one.dot.name: one for one in products}
        self.sums = {one.sends.name: one for one in products if one.factor is None}
        self.dropped = {name for one in products for name in one.between}
        self.dropped |= {one.sends.name for one in products} - set(self.sums)
        self.bodies: dict[str, Computation] = {}
        self.zeros: dict[str, str] = {}

    def computation(self) -> Computation:
        """The computation as it becomes."""
        rows: dict[str, Instruction] = {}
        for one in self.inside.instructions.values():
            if one.name in self.products:
                rows |= self._product(self.products[one.name])
            elif one.name in self.sums:
                # All who read it slice their part of the whole; the part is all that there is.
                of = self.sums[one.name].dot.name
                rows |= instructions(f"%{one.name} = {one.shape} bitcast(%{of})")
            elif one.name not in self.dropped:
                rows[one.name] = one
        return Computation(self.inside.name, rows, rows[self.inside.root.name])

    def _product(self, found: WindowedProduct) -> dict[str, Instruction]:
        text = _Text(self.inside, found)
        if found.count > _AT_ONCE:
            before, body, after = text.loop()
            made = _computation(text.body, body)
            self.bodies[made.name] = made
            return instructions(before + after)
        if found.factor is not None:
            return instructions(text.gathered())
        kind = f"{text.part} {text.onward}"
        zeros = self.zeros.setdefault(kind, text.name)
        return instructions(text.summed(zeros))


class _Text:
    """What one product becomes, as HLO's text."""

    def __init__(self, inside: Computation, found: WindowedProduct):
        dot, count = found.dot, found.count
        self.name = dot.name
        self.body = f"{WINDOWED}.{dot.name}"
        self.found = found
        pairs = [(g[at], g[(at + 1) % count]) for g in found.groups for at in range(count)]
        self.onward = _pairs(pairs)
        self.backward = _pairs([(target, source) for source, target in pairs])
        _, mark, rest = dot.attributes.partition("metadata={")
        self.said = f", {mark}{rest}" if mark else ""
        whole, summed = dot.arrays[0], summed_size(inside, dot)
        size = math.prod(whole.sizes)
        self.whole = _shape(whole, *whole.sizes)
        self.part = _shape(found.part, *found.part.sizes)
        factors = [inside.instructions[name].arrays[0] for name in dot.operands]
        shapes = [_shape(one, *one.sizes) for one in factors]
        place = 0 if found.factor is None else 1 - found.factor
        self.other, other = dot.operands[place], factors[place]
        rows, columns = summed, math.prod(other.sizes) // summed
        if found.factor is None:
            self.here = dot.operands[1]
            self.carried = [*shapes, self.part, self.part]
            columns = columns * 2 // count
        else:
            self.here = found.sends.operands[0]
            self.carried = [shapes[place], self.part, self.whole, self.part]
            rows = rows * 2 // count if found.inner else rows
        # What two parts are multiplied with, at first the axis that is summed over; and the result.
        self.read = _shape(other, rows, columns)
        self.made = _shape(whole, size if found.inner else size * 2 // count)

    def gathered(self) -> str:
        """With four devices, of which each has a part of a factor."""
        buffer = "" if self.found.inner else f"%{self.name}.whole = {self.whole} broadcast()\n"
        came = f"{self.name}.came"
        into = "" if self.found.inner else f"{self.name}.whole"
        sent = self._send(came, self.here, self.onward)
        return buffer + sent + self._two_gathered(self.other, self.here, came, into, self.name)

    def summed(self, zeros: str) -> str:
        """With four devices, of which each keeps a part of the sum.

        Args:
            zeros: name of the product whose zeros are sent; others of its kind take the same.
        """
        text = ""
        if zeros == self.name:
            text = f"%{zeros}.zeros = {self.part} broadcast()\n" + self._send_both(
                f"{zeros}.sent", f"{zeros}.zeros", f"{zeros}.zeros"
            )
        text += self._two_summed(self.other, self.here, f"{zeros}.sent")
        return text + self._joined(f"{self.name}.odd.back", f"{self.name}.odd.on")

    def loop(self) -> tuple[str, str, str]:
        """With more devices: what comes before the loop, its body, and what comes after it."""
        name, carry = self.name, f"({', '.join(self.carried)})"
        other, here, third, fourth = known = [f"{name}.in.{at}" for at in range(4)]
        body = f"%{name}.in = {carry} parameter(0)\n"
        body += "".join(
            _element(one, f"{name}.in", at, self.carried) for at, one in enumerate(known)
        )
        if self.found.factor is None:
            before = "".join(f"%{name}.zeros.{at} = {self.part} broadcast()\n" for at in (2, 3))
            start = f"%{self.other}, %{self.here}, %{name}.zeros.2, %{name}.zeros.3"
            body += self._send_both(f"{name}.sent", third, fourth)
            body += self._two_summed(other, here, f"{name}.sent")
            end = f"%{other}, %{here}, %{name}.odd.back, %{name}.odd.on"
        else:
            before = self._send(f"{name}.came", self.here, self.onward)
            before += f"%{name}.whole = {self.whole} broadcast()\n"
            start = f"%{self.other}, %{self.here}, %{name}.whole, %{name}.came"
            body += self._two_gathered(other, here, fourth, third, f"{name}.sum")
            body += self._send_both(f"{name}.out", f"{name}.next.back", f"{name}.next.on")
            end = f"%{other}, %{name}.out.back, %{name}.sum, %{name}.out.on"
        body += f"ROOT %{name}.end = {carry} tuple({end})"
        runs = f'backend_config={{"known_trip_count":{{"n":"{self.found.count // _AT_ONCE}"}}}}'
        before += f"%{name}.start = {carry} tuple({start})\n"
        before += (
            f"%{name}.loop = {carry} while(%{name}.start), condition=%{_TEST}, body=%{self.body}, "
            f"{runs}{self.said}\n"
        )
        left = [_element(f"{name}.left.{at}", f"{name}.loop", at, self.carried) for at in (2, 3)]
        if self.found.factor is None:
            return before, body, "".join(left) + self._joined(f"{name}.left.2", f"{name}.left.3")
        return before, body, _element(name, f"{name}.loop", 2, self.carried)

    def _two_gathered(self, other: str, here: str, came: str, into: str, result: str) -> str:
        """Two steps; the parts that come next are called `NAME.next.back` and `NAME.next.on`."""
        name = self.name
        text = f"%{name}.read = {self.read} bitcast(%{other})\n"
        text += self._multiply(f"{name}.even", self.made, f"%{here}, %{came}")
        text += self._send_both(f"{name}.next", here, came)
        parts = f"%{name}.next.back, %{name}.next.on"
        if self.found.inner:
            added = f"%{into}, %{name}.even" if into else f"%{name}.even"
            over = ", output_to_operand_aliasing={{}: (3, {})}, "
            return text + self._multiply(result, self.whole, f"{parts}, {added}", over)
        text += f"%{name}.half = {self.whole} dynamic-update-slice(%{into}, %{name}.even)\n"
        text += self._multiply(f"{name}.odd", self.made, parts)
        odd = f"dynamic-update-slice(%{name}.half, %{name}.odd){self.said}\n"
        return text + f"%{result} = {self.whole} {odd}"

    def _two_summed(self, left: str, right: str, sent: str) -> str:
        """Two steps, from the parts `SENT.back` and `SENT.on` to those of `NAME.odd`."""
        name, text = self.name, f"%{self.name}.read = {self.read} bitcast(%{left})\n"
        for step in ("even", "odd"):
            text += self._multiply(f"{name}.{step}", self.made, f"%{right}")
            for way in ("back", "on"):
                added = f"add(%{sent}.{way}, %{name}.{step}){self.said}"
                text += f"%{name}.{step}.{way} = {self.part} {added}\n"
            if step == "even":
                sent = f"{name}.next"
                text += self._send_both(sent, f"{name}.even.back", f"{name}.even.on")
        return text

    def _joined(self, back: str, onward: str) -> str:
        """The sum of its two halves."""
        text = self._send(f"{self.name}.last", onward, self.onward)
        return text + f"%{self.name} = {self.part} add(%{back}, %{self.name}.last){self.said}\n"

    def _multiply(self, name: str, shape: str, with_: str, over: str = "") -> str:
        read = f"%{self.name}.read, {with_}"
        return f"%{name} = {shape} dot({read}), lhs_contracting_dims={{0}}{over}{self.said}\n"

    def _send_both(self, name: str, back: str, onward: str) -> str:
        sent = self._send(f"{name}.back", back, self.backward)
        return sent + self._send(f"{name}.on", onward, self.onward)

    def _send(self, name: str, what: str, pairs: str) -> str:
        return f"%{name} = {self.part} collective-permute(%{what}), {pairs}{self.said}\n"


def _shape(like: ArrayShape, *sizes: int) -> str:
    return f"{like.dtype}[{','.join(map(str, sizes))}]"


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    return f"source_target_pairs={{{','.join(f'{{{a},{b}}}' for a, b in pairs)}}}"


def _element(name: str, of: str, at: int, shapes: Sequence[str]) -> str:
    return f"%{name} = {shapes[at]} get-tuple-element(%{of}), index={at}\n"


def _computation(name: str, text: str) -> Computation:
    rows = instructions(text)
    return Computation(name, rows, list(rows.values())[-1])
