"""The cost of one HLO instruction: flops of products, bytes of memory.

Flops are multiplications and additions of matrix products and convolutions; an elementwise
instruction takes the time of its bytes. Bytes are of operands and results, each once, as a fusion
reads and writes them; of a sliced operand only the slice counts.

>>> from isoshard.core.runtime.hlo_text import parsed
>>> module = parsed('''
... HloModule step
... ENTRY %main (a: bf16[8,16], b: bf16[16,4]) -> bf16[8,4] {
...   %a = bf16[8,16]{1,0} parameter(0)
...   %b = bf16[16,4]{1,0} parameter(1)
...   ROOT %dot = bf16[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
... }''')
>>> costs_of(module, module.entry, module.root)
Costs(flops=1024.0, bytes=448.0, dtype='bf16')

The trip count of a loop is XLA's annotation (`known_trip_count`). Programs of TPUs have none; their
loops count: an element of the carry starts at a constant, grows by a constant in each iteration,
and is compared with a constant or another element.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from isoshard.core.kit import ArrayShape, Computation, HloModule, Instruction

FREE = frozenset(
    "add-dependency after-all bitcast constant get-tuple-element opt-barrier optimization-barrier "
    "parameter partition-id replica-id tuple".split()
)
"""Opcodes of instructions that take no time and no memory of their own."""

RUNS_OTHERS = frozenset(("while", "call", "conditional"))
"""Opcodes of instructions whose cost is that of the computations they call."""

_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul", "__triton_gemm")

KERNEL = "flops:"
"""Prefix of the name scope with the flops of a Pallas kernel; HLO has only its binary."""

_KERNEL = re.compile(rf'op_name="(?:[^"\\]|\\.)*\b{KERNEL}(\d+)/[^/"]*"')


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost of one run of one instruction.

    Attributes:
        flops: operations of products.
        bytes: read and written.
        dtype: that it computes in, as HLO names it.
    """

    flops: float
    bytes: float
    dtype: str


def costs_of(module: HloModule, inside: Computation, instruction: Instruction) -> Costs:
    """The costs of one instruction, with those of a fusion's body."""
    flops, dtype = _products(module, inside, instruction)
    if not dtype:
        dtype = instruction.arrays[0].dtype if instruction.arrays else ""
    return Costs(flops, _moved(module, inside, instruction), dtype)


def operand_arrays(inside: Computation, instruction: Instruction) -> list[ArrayShape]:
    """The arrays of all operands, in order."""
    rows = inside.instructions
    return [array for name in instruction.operands if name in rows for array in rows[name].arrays]


def _products(module: HloModule, inside: Computation, row: Instruction) -> tuple[float, str]:
    """Operations of the products in an instruction, and the dtype of most of them."""
    operands = operand_arrays(inside, row)
    if row.opcode == "dot" and operands:
        sizes = operands[0].sizes
        summed = _indices(r"lhs_contracting_dims=\{([\d,]*)\}", row.attributes)
        return _product(row, [sizes[axis] for axis in summed]), operands[0].dtype
    if row.opcode == "convolution" and len(operands) > 1:
        return _convolution(row, *operands[:2]), operands[0].dtype
    if row.opcode == "custom-call" and operands:
        return _library_product(row, operands)
    if row.opcode not in ("fusion", "async-start", "call-start"):
        return 0.0, ""
    total, most, dtype = 0.0, 0.0, ""
    for name in row.called:
        body = module.computations.get(name)
        if body is None:
            continue
        for inner in body.instructions.values():
            flops, kind = _products(module, body, inner)
            total += flops
            if flops > most:
                most, dtype = flops, kind
    return total, dtype


def _product(row: Instruction, summed: list[int]) -> float:
    return 2.0 * math.prod(row.arrays[0].sizes) * math.prod(summed)


def _library_product(row: Instruction, operands: list[ArrayShape]) -> tuple[float, str]:
    kernel = _KERNEL.search(row.attributes)
    if kernel:
        return float(kernel[1]), operands[0].dtype
    target = re.search(r'custom_call_target="([^"]*)"', row.attributes)
    name = target[1] if target else ""
    if name.startswith("__cudnn$conv") and len(operands) > 1:
        return _convolution(row, *operands[:2]), operands[0].dtype
    if name.startswith(_GEMMS):
        match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', row.attributes)
        axes = [int(axis) for axis in re.findall(r"\d+", match[1])] if match else [-1]
        return _product(row, [operands[0].sizes[axis] for axis in axes]), operands[0].dtype
    return 0.0, ""


def _convolution(row: Instruction, image: ArrayShape, kernel: ArrayShape) -> float:
    """Operations of a convolution: products of elements that exist, not of padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", row.attributes)
    if labels is None:
        return 0.0
    out = row.arrays[0]
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", _window(row.attributes)))
    spatial = sorted(label for label in labels[2] if label.isdigit())
    pairs = 1.0
    for at, label in enumerate(spatial):
        size = kernel.sizes[labels[2].index(label)]
        pairs *= _pairs(
            image.sizes[labels[1].index(label)],
            size,
            out.sizes[labels[3].index(label)],
            {name: value.split("x")[at] for name, value in window.items() if name != "size"},
        )
    batch, features = (out.sizes[labels[3].index(label)] for label in "bf")
    groups = re.search(r"batch_group_count=(\d+)", row.attributes)
    summed = kernel.sizes[labels[2].index("i")]
    return 2.0 * pairs * batch * features * summed / (int(groups[1]) if groups else 1)


def _window(attributes: str) -> str:
    match = re.search(r"window=\{([^}]*)\}", attributes)
    return match[1] if match else ""


def _pairs(image: int, kernel: int, out: int, window: dict[str, str]) -> float:
    """How many pairs of an image's and a kernel's element are multiplied along one axis."""
    if image * kernel * out == 0:
        return 0.0
    stride, base = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    dilation = int(window.get("rhs_dilate", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    if kernel * out > 1 << 22 or (kernel == 1 and low == 0 and base == 1):
        return float(kernel * out)
    positions = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * dilation - low
    inside = (positions >= 0) & (positions <= (image - 1) * base) & (positions % base == 0)
    return float(inside.sum())


def _moved(module: HloModule, inside: Computation, row: Instruction) -> float:
    if row.opcode in FREE or row.opcode in RUNS_OTHERS or row.opcode.endswith("-done"):
        return 0.0
    results = sum(array.bytes for array in row.arrays)
    operands = operand_arrays(inside, row)
    if row.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * results
    if row.opcode in ("dynamic-update-slice", "scatter"):
        return 2.0 * sum(array.bytes for array in operands[1:])
    body = module.computations.get(row.called[0]) if row.called else None
    if row.opcode != "fusion" or body is None:
        return float(results + sum(array.bytes for array in operands))
    return _moved_by_fusion(body, row)


def _moved_by_fusion(body: Computation, row: Instruction) -> float:
    total = 0.0
    for parameter in body.parameters:
        total += sum(_read(body, parameter, user) for user in _distinct(body, parameter))
    roots = [body.root]
    if body.root.opcode == "tuple":
        roots = [body.instructions[name] for name in body.root.operands]
    for root in roots:
        written = _through(body, root)
        if written.opcode == "dynamic-update-slice":
            total += body.instructions[written.operands[1]].arrays[0].bytes
        else:
            total += sum(array.bytes for array in root.arrays)
    return total


def _distinct(body: Computation, parameter: Instruction) -> list[Instruction]:
    """The users that read a parameter: slices of it, or one that reads all of it."""
    users = body.users[parameter.name]
    if all(_is_partial(user, parameter) for user in users):
        return list(users)
    return [next(user for user in users if not _is_partial(user, parameter))]


def _is_partial(user: Instruction, parameter: Instruction) -> bool:
    slices = user.opcode in ("dynamic-slice", "slice", "gather", "dynamic-update-slice")
    return slices and user.operands[0] == parameter.name


def _read(body: Computation, parameter: Instruction, user: Instruction) -> float:
    if not _is_partial(user, parameter):
        return float(sum(array.bytes for array in parameter.arrays))
    if user.opcode == "dynamic-update-slice":
        return 0.0
    return float(user.arrays[0].bytes)


def _through(body: Computation, row: Instruction) -> Instruction:
    """The source of an instruction, through bitcasts, copies and conversions."""
    while row.opcode in ("bitcast", "convert", "copy") and row.operands:
        row = body.instructions[row.operands[0]]
    return row


def _indices(pattern: str, text: str) -> list[int]:
    match = re.search(pattern, text)
    return [int(index) for index in match[1].split(",") if index] if match else []


_NOTED = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SAME = frozenset(("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape"))


def trips(module: HloModule, inside: Computation, loop: Instruction) -> int:
    """The trip count of a loop; 1 if it is not known."""
    match = _NOTED.search(loop.attributes)
    if match:
        return int(match[1])
    body, condition = (module.computations[name] for name in _loop_bodies(loop))
    test = _test(module, condition)
    if test is None:
        return 1
    counter, limit = test
    start = _constant(inside, _initial(inside, loop, counter))
    if isinstance(limit, tuple):
        stop = _constant(inside, _initial(inside, loop, limit[0]))
    else:
        stop = limit
    step = _step(module, body, counter)
    if start is None or stop is None or not step:
        return 1
    return max(0, -(-(stop - start) // step))


def _loop_bodies(loop: Instruction) -> tuple[str, str]:
    result = dict(re.findall(r"\b(body|condition)=%?([\w.\-]+)", loop.attributes))
    return result["body"], result["condition"]


def _test(module: HloModule, condition: Computation) -> tuple[int, int | tuple[int]] | None:
    """The carry's counter, and its upper bound: a constant, or the (element,) of the carry."""
    inside, root = condition, condition.root
    arguments: dict[str, Instruction] = {}
    if root.opcode == "fusion":
        inside = module.computations[root.called[0]]
        outer = [condition.instructions[name] for name in root.operands]
        arguments = {
            p.name: parameter for p, parameter in zip(inside.parameters, outer, strict=True)
        }
        root = inside.root
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    left, right = (_source(inside, arguments, name) for name in root.operands)
    counter = _index(left)
    if counter is None:
        return None
    if right.opcode == "constant":
        return counter, int(right.arguments)
    limit = _index(right)
    return None if limit is None else (counter, (limit,))


def _source(inside: Computation, arguments: dict[str, Instruction], name: str) -> Instruction:
    row = inside.instructions[name]
    while row.name in arguments or (row.opcode in _SAME and row.operands[0] in inside.instructions):
        row = arguments[row.name] if row.name in arguments else inside.instructions[row.operands[0]]
    return row


def _index(row: Instruction) -> int | None:
    match = re.search(r"index=(\d+)", row.attributes)
    return int(match[1]) if match and row.opcode == "get-tuple-element" else None


def _initial(inside: Computation, loop: Instruction, index: int) -> Instruction | None:
    """The initial value of an element of a loop's carry."""
    start = inside.instructions[loop.operands[0]]
    if start.opcode != "tuple" or index >= len(start.operands):
        return None
    return inside.instructions[start.operands[index]]


def _constant(inside: Computation, row: Instruction | None) -> int | None:
    while row is not None and row.opcode in _SAME and row.operands:
        row = inside.instructions.get(row.operands[0])
    if row is None or row.opcode != "constant":
        return None
    return int(row.arguments) if re.fullmatch(r"-?\d+", row.arguments) else None


def _step(module: HloModule, body: Computation, index: int) -> int:
    """The increment of an element of the carry in one iteration."""
    if body.root.opcode != "tuple":
        return 1
    return _grown(module, body, body.root.operands[index], 0) or 1


def _grown(module: HloModule, inside: Computation, name: str, depth: int) -> int:
    row = inside.instructions.get(name)
    if row is None or depth > 8:
        return 0
    if row.opcode in _SAME:
        return _grown(module, inside, row.operands[0], depth + 1)
    if row.opcode == "add":
        operands = [inside.instructions[operand] for operand in row.operands]
        fixed = [operand for operand in operands if operand.opcode == "constant"]
        rest = [operand for operand in operands if operand.opcode != "constant"]
        increment = sum(_constant(inside, operand) or 0 for operand in fixed)
        return increment + sum(_grown(module, inside, other.name, depth + 1) for other in rest)
    if row.opcode == "fusion":
        within = module.computations[row.called[0]]
        grown = _grown(module, within, within.root.name, depth + 1)
        outer = [_grown(module, inside, operand, depth + 1) for operand in row.operands]
        return grown + sum(outer)
    return 0
