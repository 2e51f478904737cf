"""An HLO module's text as computations and instructions.

>>> module = parsed('''
... HloModule step, is_scheduled=true
... ENTRY %main (p: f32[8]) -> f32[8] {
...   %p = f32[8]{0} parameter(0)
...   ROOT %twice = f32[8]{0} add(%p, %p), metadata={op_name="jit(f)/line:a.py:3 (f)/add"}
... }''')
>>> module.root.opcode, module.root.operands, module.line_of(module.root)
('add', ('p', 'p'), 'a.py:3 (f)')

Source: the text form of XLA's HLO, https://openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

from isoshard.core.runtime.hlo_collectives import array_bytes, split_shape, tuple_parts
from isoshard.core.traced.source_lines import is_users, said_by, written


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
        """Of all elements, without padding."""
        return array_bytes(self.dtype, ",".join(map(str, self.sizes)))


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
        result = dict(_CALLED.findall(self.attributes))
        names = [result[key] for key in _ORDER if key in result]
        for several in _BRANCHES.finditer(self.attributes):
            names += [each.strip(" %") for each in several["names"].split(",") if each.strip()]
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
        parameters = [row for row in self.instructions.values() if row.opcode == "parameter"]
        return tuple(sorted(parameters, key=lambda parameter: int(parameter.arguments)))

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Who takes an instruction's result, by its name."""
        result: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for row in self.instructions.values():
            for operand in dict.fromkeys(row.operands):
                result.setdefault(operand, []).append(row)
        return {name: tuple(users) for name, users in result.items()}


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

    @functools.cached_property
    def _lines(self) -> dict[str, str]:
        """What `line_of` has found, by its metadata's text."""
        return {}

    def line_of(self, instruction: Instruction) -> str:
        """The user's line of an instruction; "" if none is known."""
        line = instruction.attributes.partition("metadata={")[2]
        if not line:
            return ""
        if line not in self._lines:
            self._lines[line] = self._line_of(instruction)
        return self._lines[line]

    def _line_of(self, instruction: Instruction) -> str:
        name = _OP_NAME.search(instruction.attributes)
        line = said_by(name["path"].replace('\\"', '"')) if name else None
        if line is not None:
            return line
        frame = _FRAME.search(instruction.attributes)
        if frame:
            return self._line_of_frame(frame["number"])
        file = _SOURCE.search(instruction.attributes)
        if file and is_users(file["file"]):
            return written(file["file"], int(file["line"]), "").removesuffix(" ()")
        return ""

    def _line_of_frame(self, number: str) -> str:
        visited: set[str] = set()
        while number in self.frames and number not in visited:
            visited.add(number)
            file, line, function, caller = self.frames[number]
            if file and is_users(file):
                return written(file, int(line), function)
            number = caller
        return ""


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
_OP_NAME = re.compile(r'op_name="(?P<path>(?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(?P<number>\d+)")
_SOURCE = re.compile(r'source_file="(?P<file>[^"]*)" source_line=(?P<line>\d+)')
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_COMMENT = re.compile(r"/\*.*?\*/")


@functools.lru_cache(maxsize=4096)
def arrays_of(shape: str) -> tuple[ArrayShape, ...]:
    """The arrays in a shape's text, in order."""
    arrays = []
    for one in _ARRAY.finditer(shape):
        sizes = [int(size.removeprefix("<=")) for size in one["sizes"].split(",") if size]
        space = _SPACE.search(one["layout"] or "")
        arrays.append(ArrayShape(one["dtype"], tuple(sizes), int(space[1]) if space else 0))
    return tuple(arrays)


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
            number, _, rest = line.partition(" ")
            tables[table][number] = rest
        elif match := (not line[:1].isspace() and _HEADER.match(line)):
            name, rows, root = match["name"], {}, None
            entry = name if match["entry"] else entry
        elif line.startswith("}") and name:
            last = root or list(rows.values())[-1]
            computations[name] = Computation(name, rows, last)
        elif match := _LINE.match(line):
            one = _add(rows, match)
            root = one if one and match["root"] else root
    if entry not in computations:
        raise ValueError("the text has no entry computation, so it is no whole HLO module")
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
    add = _instruction(line["name"], line["rest"])
    if add is None:
        return None
    for operand in add.operands:
        source, *indices = operand.split("#")
        for index in indices:
            name = f"{source}.get-tuple-element.{index}"
            if name not in rows:
                shape = tuple_parts(rows[source].shape)[int(index)].strip()
                arguments, attributes = f"%{source}", f", index={index}"
                rows[name] = Instruction(
                    name, "get-tuple-element", shape, (source,), arguments, attributes
                )
            source = name
        if indices:
            operands = tuple(source if name == operand else name for name in add.operands)
            arguments = re.sub(rf"%{re.escape(operand)}(?!\d)", f"%{source}", add.arguments)
            add = dataclasses.replace(add, operands=operands, arguments=arguments)
    rows[add.name] = add
    return add


def _instruction(name: str, rest: str) -> Instruction | None:
    shape, rest = split_shape(_COMMENT.sub("", rest) if "/*" in rest else rest)
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
    files = {at: one.strip('"') for at, one in tables.get("FileNames", {}).items()}
    functions = {at: one.strip('"') for at, one in tables.get("FunctionNames", {}).items()}
    positions = tables.get("FileLocations", {})
    rows = tables.get("StackFrames", {})
    frames = {number: dict(re.findall(r"(\w+)=(\d+)", row)) for number, row in rows.items()}
    # A caller's number is printed one too large by today's XLA: the first frame, which has none,
    # says 1.
    extra = min((int(frame.get("parent_frame_id", 0)) for frame in frames.values()), default=0)
    result = {}
    for number, frame in frames.items():
        place = dict(
            re.findall(r"(\w+)=(\d+)", positions.get(frame.get("file_location_id", ""), ""))
        )
        result[number] = (
            files.get(place.get("file_name_id", ""), ""),
            place.get("line", "0"),
            functions.get(place.get("function_name_id", ""), ""),
            str(int(frame.get("parent_frame_id", 0)) - extra),
        )
    return result
