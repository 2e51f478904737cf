"""An HLO module's text as computations and instructions.

>>> module = parsed('''
... HloModule step, is_scheduled=true
... ENTRY %main (p: f32[8]) -> f32[8] {
...   %p = f32[8]{0} parameter(0)
...   ROOT %twice = f32[8]{0} add(%p, %p)
... }''')
>>> module.root.opcode, module.root.operands, module.root.arrays
('add', ('p', 'p'), (ArrayShape(dtype='f32', sizes=(8,), space=0),))

Source: the text form of XLA's HLO, https://openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from .caches import cached


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """A dtype and sizes of axes, of one device.

    Attributes:
        dtype: as HLO names it, "bf16".
        sizes: of the axes.
        space: the memory that it is in; 0 is the device's main one.
    """

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        """Of all elements, without padding; types below one byte are packed."""
        if self.dtype in ("token", "opaque"):
            return 0
        digits = re.search(r"\d+", self.dtype)
        bits = 8 if self.dtype == "pred" or digits is None else int(digits[0])
        return -(-math.prod(self.sizes) * bits // 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in the module.
        opcode: "fusion", "all-gather-start".
        shape: text of its result's shape.
        operands: names of those.
        arguments: text between the parentheses.
        attributes: text after them.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    @functools.cached_property
    def arrays(self) -> tuple[ArrayShape, ...]:
        """The arrays of the result, in order; of a tuple in a tuple, too."""
        return arrays_of(self.shape)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls, a loop's body first."""
        by_key = dict(_CALLED.findall(self.attributes))
        names = [by_key[key] for key in _ORDER if key in by_key]
        for several in _BRANCHES.finditer(self.attributes):
            names += [name.strip(" %") for name in several["names"].split(",") if name.strip()]
        return tuple(names)

    @property
    def text(self) -> str:
        """What stands after the `=`."""
        return f"{self.shape} {self.opcode}({self.arguments}){self.attributes}"


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they run, if the module is scheduled.

    Attributes:
        name: unique in the module.
        instructions: all, by name.
        root: the one that gives the result.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """In the order of their numbers."""
        parameters = [
            instruction
            for instruction in self.instructions.values()
            if instruction.opcode == "parameter"
        ]
        return tuple(sorted(parameters, key=lambda instruction: int(instruction.arguments)))

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Who takes an instruction's result, by its name."""
        by_name: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                by_name.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in by_name.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class HloModule:
    """A program of one device.

    Attributes:
        header: its first line.
        computations: by name.
        entry: the computation that runs first.
        frames: of each stack frame its file, line and function, and its caller's number.
    """

    header: str
    computations: Mapping[str, Computation]
    entry: Computation
    frames: Mapping[str, tuple[str, str, str, str]]

    @property
    def root(self) -> Instruction:
        """The instruction that gives the program's result."""
        return self.entry.root

    @property
    def scheduled(self) -> bool:
        """Whether instructions stand in the order in which they run."""
        return "is_scheduled=true" in self.header

    @functools.cached_property
    def aliased(self) -> Mapping[int, int]:
        """Numbers of results that lie in the memory of an argument -> the argument's number."""
        match = re.search(r"input_output_alias=\{(.*?) \}(?:,|$)", self.header)
        pairs = _ALIAS.finditer(match[1]) if match else ()
        return {int(pair["result"] or 0): int(pair["argument"]) for pair in pairs}


_ORDER = ("body", "calls", "to_apply", "true_computation", "false_computation", "condition")
_CALLED = re.compile(rf"\b({'|'.join(_ORDER)})=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{(?P<names>[^}]*)\}")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,<=]*)\](?:\{(?P<layout>[^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_ALIAS = re.compile(r"\{(?P<result>\d*)\}: \((?P<argument>\d+),")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_COMMENT = re.compile(r"/\*.*?\*/")


@cached(4096)
def arrays_of(shape: str) -> tuple[ArrayShape, ...]:
    """The arrays in a shape's text, in order.

    Args:
        shape: of an array or a tuple.
    """
    arrays = []
    for match in _ARRAY.finditer(shape):
        sizes = [int(size.removeprefix("<=")) for size in match["sizes"].split(",") if size]
        space = _SPACE.search(match["layout"] or "")
        arrays.append(ArrayShape(match["dtype"], tuple(sizes), int(space[1]) if space else 0))
    return tuple(arrays)


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape's text."""
    return sum(array.bytes for array in arrays_of(shape))


def _split_shape(text: str) -> tuple[str, str]:
    """Split an instruction's `shape opcode(..)..` after the shape."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for end, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: end + 1], text[end + 1 :]
    return text, ""


def tuple_elements(shape: str) -> list[str]:
    """The texts of the elements of a tuple's shape."""
    elements, depth, start = [], 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or depth == 0:
            elements.append(shape[start:at])
            start = at + 1
    return elements


def parsed(text: str) -> HloModule:
    """Read a module.

    Raises:
        ValueError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[str, str]] = {}
    header, entry, name, table = "", "", "", ""
    rows: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif _TABLE.match(line):
            table = line
            tables[table] = {}
        elif line[:1].isdigit() and table:
            index, _, rest = line.partition(" ")
            tables[table][index] = rest
        elif match := (not line[:1].isspace() and _HEADER.match(line)):
            name, rows, root = match["name"], {}, None
            entry = name if match["entry"] else entry
        elif line.startswith("}") and name:
            last = root or list(rows.values())[-1]
            computations[name] = Computation(name, rows, last)
        elif match := _LINE.match(line):
            instruction = _add(rows, match)
            root = instruction if instruction and match["root"] else root
    if entry not in computations:
        raise ValueError("the text has no entry computation, so it is no complete HLO module")
    return HloModule(header, computations, computations[entry], _frames(tables))


def instructions(text: str) -> dict[str, Instruction]:
    """Read instructions, of which each stands in a line of its own.

    Returns:
        By name, in order.

    Example:
        >>> list(instructions("  %a = f32[8] parameter(0)\\n  ROOT %b = f32[8] add(%a, %a)"))
        ['a', 'b']
    """
    rows: dict[str, Instruction] = {}
    for line in text.splitlines():
        if match := _LINE.match(f" {line}"):
            _add(rows, match)
    return rows


def _add(rows: dict[str, Instruction], line: re.Match[str]) -> Instruction | None:
    """Read a line into the instructions before it, and the elements of tuples that it names.

    XLA 0.12 dumps `%p#1` for the result of `get-tuple-element(%p), index=1` (its option
    `xla_dump_compact_gte`), and no line for it. It becomes an instruction of its own.
    """
    instruction = _instruction(line["name"], line["rest"])
    if instruction is None:
        return None
    for operand in instruction.operands:
        source, *indices = operand.split("#")
        for index in indices:
            name = f"{source}.get-tuple-element.{index}"
            if name not in rows:
                shape = tuple_elements(rows[source].shape)[int(index)].strip()
                arguments, attributes = f"%{source}", f", index={index}"
                rows[name] = Instruction(
                    name, "get-tuple-element", shape, (source,), arguments, attributes
                )
            source = name
        if indices:
            operands = tuple(source if name == operand else name for name in instruction.operands)
            arguments = re.sub(rf"%{re.escape(operand)}(?!\d)", f"%{source}", instruction.arguments)
            instruction = dataclasses.replace(instruction, operands=operands, arguments=arguments)
    rows[instruction.name] = instruction
    return instruction


def _instruction(name: str, rest: str) -> Instruction | None:
    shape, rest = _split_shape(_COMMENT.sub("", rest) if "/*" in rest else rest)
    match = _OPCODE.match(rest)
    if match is None:
        return None
    depth, end = 1, match.end()
    while depth and end < len(rest):
        depth += (rest[end] == "(") - (rest[end] == ")")
        end += 1
    arguments, attributes = rest[match.end() : end - 1], rest[end:]
    operands = () if match["opcode"] in ("constant", "parameter") else _OPERAND.findall(arguments)
    return Instruction(name, match["opcode"], shape, tuple(operands), arguments, attributes)


def _frames(tables: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, str, str, str]]:
    """Each stack frame's file, line, function and caller, from the four tables of a module."""
    files = {at: name.strip('"') for at, name in tables.get("FileNames", {}).items()}
    functions = {at: name.strip('"') for at, name in tables.get("FunctionNames", {}).items()}
    locations = tables.get("FileLocations", {})
    rows = tables.get("StackFrames", {})
    frames = {index: dict(re.findall(r"(\w+)=(\d+)", row)) for index, row in rows.items()}
    # A caller's number is printed one too large by today's XLA: the first frame, which has none,
    # says 1.
    extra = min((int(frame.get("parent_frame_id", 0)) for frame in frames.values()), default=0)
    resolved = {}
    for index, frame in frames.items():
        location = dict(
            re.findall(r"(\w+)=(\d+)", locations.get(frame.get("file_location_id", ""), ""))
        )
        resolved[index] = (
            files.get(location.get("file_name_id", ""), ""),
            location.get("line", "0"),
            functions.get(location.get("function_name_id", ""), ""),
            str(int(frame.get("parent_frame_id", 0)) - extra),
        )
    return resolved
