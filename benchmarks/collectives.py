"""Count the collectives of a compiled program, and the bytes they move, from its HLO text.

>>> program = '''
... ENTRY %main {
...   %p = f32[4,8]{1,0} parameter(0)
...   %all-reduce.1 = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
...   %ag = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%all-reduce.1), dimensions={0}
...   ROOT %done = f32[8,8]{1,0} all-gather-done(%ag)
... }'''
>>> for line in find(program):
...     print(line)
Collective(kind='all-reduce', bytes=128)
Collective(kind='all-gather', bytes=256)
>>> summarize(program)
{'all-gather': (1, 256), 'all-reduce': (1, 128)}

The bytes are those of the result on one device; of a tuple, the sum. An asynchronous pair counts
once, at its `-start`. A collective inside a loop counts once, however often the loop runs.

Source: https://openxla.org/xla/operation_semantics and the text form of XLA's HLO.
"""

from __future__ import annotations

import re
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_LAYOUT = r"(?:\{[^{}]*\})?"
# `name = shape opcode(`; the shape of a tuple is read by counting parentheses instead.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<rest>.*)$", re.MULTILINE)
_ARRAY = re.compile(rf"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\]{_LAYOUT}")
_OPCODE = re.compile(rf"\s*(?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        kind: its name in HLO, without `-start`.
        bytes: size of its result on one device.
    """

    kind: str
    bytes: int


def find(program: str) -> list[Collective]:
    """List the collectives of an HLO module's text, in the order of the text."""
    found = []
    for instruction in _INSTRUCTION.finditer(program):
        shape, rest = _split_shape(instruction["rest"])
        opcode = _OPCODE.match(rest)
        if opcode is None:
            continue
        if opcode["start"] and opcode["kind"] != "all-reduce":
            shape = _parts(shape)[1]  # (operands, results, ..); all-reduce-start has results only
        found.append(Collective(opcode["kind"], _bytes(shape)))
    return found


def summarize(program: str) -> dict[str, tuple[int, int]]:
    """Count and total bytes of each kind of collective that occurs in an HLO module's text."""
    found = find(program)
    kinds = sorted({collective.kind for collective in found})
    return {
        kind: (len(sizes), sum(sizes))
        for kind in kinds
        for sizes in [[c.bytes for c in found if c.kind == kind]]
    }


def _split_shape(text: str) -> tuple[str, str]:
    """Split `shape opcode(..)..` after the shape."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for end, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: end + 1], text[end + 1 :]
    return text, ""


def _parts(shape: str) -> list[str]:
    """The elements of a tuple shape."""
    parts, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(shape[start:at])
            start = at + 1
    return parts


def _bytes(shape: str) -> int:
    return sum(_array_bytes(array["dtype"], array["dims"]) for array in _ARRAY.finditer(shape))


def _array_bytes(dtype: str, dims: str) -> int:
    """Bytes of one array, such as `bf16` and `2,<=3`; types below one byte are packed."""
    elements = 1
    for dim in filter(None, dims.split(",")):
        elements *= int(dim.removeprefix("<="))
    if dtype in ("token", "opaque"):
        return 0
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return -(-elements * bits // 8)
