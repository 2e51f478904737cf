"""What one HLO instruction computes and moves: operations of products, bytes of memory.

An operation is a multiplication or an addition of a product of matrices or a convolution; what is
done element by element takes the time that its bytes take. Bytes are of operands and results, each
once, as a fusion reads and writes them; of what is sliced only the slice counts.

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
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from isoshard.core.runtime.hlo_text import ArrayShape, Computation, HloModule, Instruction

FREE = frozenset(
    "add-dependency after-all bitcast constant get-tuple-element opt-barrier optimization-barrier "
    "parameter partition-id replica-id tuple".split()
)
"""Opcodes of instructions that take no time and no memory of their own."""

RUNS_OTHERS = frozenset(("while", "call", "conditional"))
"""Opcodes of instructions whose cost is that of the computations they call."""

_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul", "__triton_gemm")

KERNEL = "flops:"
"""Begins the name scope that says what a kernel of Pallas computes; HLO keeps only its binary."""

_KERNEL = re.compile(rf'op_name="(?:[^"\\]|\\.)*\b{KERNEL}(\d+)/[^/"]*"')


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one run of one instruction takes.

    Attributes:
        flops: operations of products.
        bytes: read and written.
        dtype: that it computes in, as HLO names it.
    """

    flops: float
    bytes: float
    dtype: str


def costs_of(module: HloModule, inside: Computation, instruction: Instruction) -> Costs:
    """The costs of one instruction, with those of a fusion's body.

    Args:
        module: its program.
        inside: the computation that it stands in.
        instruction: it.
    """
    flops, dtype = _products(module, inside, instruction)
    if not dtype:
        dtype = instruction.arrays[0].dtype if instruction.arrays else ""
    return Costs(flops, _moved(module, inside, instruction), dtype)


def operand_arrays(inside: Computation, instruction: Instruction) -> list[ArrayShape]:
    """The arrays of all operands, in order.

    Args:
        inside: the computation that the instruction stands in.
        instruction: it.
    """
    known = inside.instructions
    return [array for name in instruction.operands if name in known for array in known[name].arrays]


def _products(module: HloModule, inside: Computation, one: Instruction) -> tuple[float, str]:
    """Operations of the products in an instruction, and the dtype of most of them."""
    operands = operand_arrays(inside, one)
    if one.opcode == "dot" and operands:
        sizes = operands[0].sizes
        summed = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        return _product(one, [sizes[axis] for axis in summed]), operands[0].dtype
    if one.opcode == "convolution" and len(operands) > 1:
        return _convolution(one, *operands[:2]), operands[0].dtype
    if one.opcode == "custom-call" and operands:
        return _library_product(one, operands)
    if one.opcode not in ("fusion", "async-start", "call-start"):
        return 0.0, ""
    total, most, dtype = 0.0, 0.0, ""
    for name in one.called:
        body = module.computations.get(name)
        if body is None:
            continue
        for inner in body.instructions.values():
            flops, kind = _products(module, body, inner)
            total += flops
            if flops > most:
                most, dtype = flops, kind
    return total, dtype


def _product(one: Instruction, summed: list[int]) -> float:
    return 2.0 * math.prod(one.arrays[0].sizes) * math.prod(summed)


def _library_product(one: Instruction, operands: list[ArrayShape]) -> tuple[float, str]:
    kernel = _KERNEL.search(one.attributes)
    if kernel:
        return float(kernel[1]), operands[0].dtype
    target = re.search(r'custom_call_target="([^"]*)"', one.attributes)
    name = target[1] if target else ""
    if name.startswith("__cudnn$conv") and len(operands) > 1:
        return _convolution(one, *operands[:2]), operands[0].dtype
    if name.startswith(_GEMMS):
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.attributes)
        axes = [int(axis) for axis in re.findall(r"\d+", found[1])] if found else [-1]
        return _product(one, [operands[0].sizes[axis] for axis in axes]), operands[0].dtype
    return 0.0, ""


def _convolution(one: Instruction, image: ArrayShape, kernel: ArrayShape) -> float:
    """Operations of a convolution: products of elements that exist, not of padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    if labels is None:
        return 0.0
    out = one.arrays[0]
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", _window(one.attributes)))
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
    groups = re.search(r"batch_group_count=(\d+)", one.attributes)
    summed = kernel.sizes[labels[2].index("i")]
    return 2.0 * pairs * batch * features * summed / (int(groups[1]) if groups else 1)


def _window(attributes: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    return found[1] if found else ""


def _pairs(image: int, kernel: int, out: int, window: dict[str, str]) -> float:
    """How many pairs of an element of the image and one of the kernel meet along one axis."""
    if image * kernel * out == 0:
        return 0.0
    stride, base = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    apart = int(window.get("rhs_dilate", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    if kernel * out > 1 << 22 or (kernel == 1 and low == 0 and base == 1):
        return float(kernel * out)
    places = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * apart - low
    inside = (places >= 0) & (places <= (image - 1) * base) & (places % base == 0)
    return float(inside.sum())


def _moved(module: HloModule, inside: Computation, one: Instruction) -> float:
    if one.opcode in FREE or one.opcode in RUNS_OTHERS or one.opcode.endswith("-done"):
        return 0.0
    results = sum(array.bytes for array in one.arrays)
    operands = operand_arrays(inside, one)
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * results
    if one.opcode in ("dynamic-update-slice", "scatter"):
        return 2.0 * sum(array.bytes for array in operands[1:])
    body = module.computations.get(one.called[0]) if one.called else None
    if one.opcode != "fusion" or body is None:
        return float(results + sum(array.bytes for array in operands))
    return _moved_by_fusion(body, one)


def _moved_by_fusion(body: Computation, one: Instruction) -> float:
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
    """Who reads a parameter: its slices, or all of it once."""
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


def _through(body: Computation, one: Instruction) -> Instruction:
    """What an instruction passes on, behind bitcasts and conversions."""
    while one.opcode in ("bitcast", "convert", "copy") and one.operands:
        one = body.instructions[one.operands[0]]
    return one


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(number) for number in found[1].split(",") if number] if found else []
