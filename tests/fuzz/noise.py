"""Is a difference more than rounding?

Two correct devices round differently, and a program may blow that up: `log(x - y)` where both are
nearly equal, `floor` of a number that is nearly 2. So before a difference counts, the program runs
on the CPU several times more, each time with every float result disturbed in its last bits. Where
these runs differ among themselves as much as the two devices do, nothing is said about the element.

Numbers that arithmetic on small halves gives (multiples of 1/64) are exact on every device and are
left alone, unless the line that made them calls a function that devices round differently.

The sign of a NaN is undefined, and torch's own vector and scalar kernels disagree about the sign of
a zero that an activation, a minimum or a maximum gives. Both are set at random, so that nothing is
said of what depends on them (`copysign`, `view(torch.int32)`, a division by that zero). Subnormal
numbers are replaced by 0 at random: XLA computes with 0 instead. One more run is computed in 64
bits: what the CPU itself rounds away is rounding too.

A line that reads two float dtypes is disturbed as much as the coarser one rounds: torch composes
`ldexp(x, y)` of `2 ** y`, which it rounds to y's dtype, and of a product, in whose program XLA may
leave that rounding out.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import torch
from torch import nn

from . import vocabulary
from .program import Fact, Program, Run, attempt, is_leaf

RUNS = 8
FACTOR = 8.0
"""How many times the largest deviation of the disturbed runs is rounding."""

_EPS = {
    torch.float64: 2.0**-48,
    torch.complex128: 2.0**-48,
    torch.float32: 2.0**-21,
    torch.complex64: 2.0**-21,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
_ROUNDED = re.compile(
    r"exp|log|pow|\*\*|sqrt|sin|cos|tan|atan|erf|sigmoid|gamma|norm|elu|mish|std|softmax|lerp|nn\."
    r"|F\.|hypot|silu|swish|/|div|reciprocal|logit|angle|sgn|mean|var|prod|%|remainder|fmod|abs|@"
)


_CANCELS = re.compile(r"mean|var|std|norm|Norm|lgamma|gelu")
"""What a difference gives may be 0 on one device and next to 0 on another: CPU torch's gelu(-3) is
5e-7 off, where it is -0.004."""
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_DEVIATES = re.compile(r"(layer|group|batch|instance)_norm\(")
"""What is divided by a deviation, which for equal numbers is the root of 1e-5: how far a mean of
them is off counts 300 times. CPU torch's running mean of equal numbers is exact, a sum is not."""
_SIGNLESS = re.compile(r"relu|clamp|max|min|shrink|sum|matmul|mm\(|mv\(|dot|einsum|@")


def disturbed(program: Program) -> list[dict[str, Fact]]:
    """What the program leaves in several runs with rounding errors of another kind."""
    exact = _in_64_bits(program)
    return [_run(program, number).facts for number in range(RUNS)] + ([exact] if exact else [])


def refuses(program: Program, fault: str) -> bool:
    """Whether a line raises in one of these runs as well: `x[lgamma(y) == 0]` has other rows."""
    runs = (_run(program, number) for number in range(RUNS))
    return any(run.fault is not None and run.fault.split("`")[1] in fault for run in runs)


_WIDER = {"torch.float32": "torch.float64", "torch.complex64": "torch.complex128"}
_NOT_IN_64 = re.compile(r"float64|double|complex128|view\(torch|dtype|finfo|bits")


def _in_64_bits(program: Program) -> dict[str, Fact] | None:
    """What the program leaves if it is computed in 64 bits; None for one that says how wide it is.

    CPU torch's own error may be a cancellation inside one line: a batch of equal numbers does not
    become 0 in its batch norm.
    """
    if any(_NOT_IN_64.search(line.text) for line in program.lines):
        return None
    lines = []
    for line in program.lines:
        text = re.sub(r"\.float\(\)", ".double()", line.text)
        for narrow, wide in _WIDER.items():
            text = text.replace(narrow, wide)
        lines.append(dataclasses.replace(line, text=text))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        run = Program(tuple(lines)).run("cpu")
    finally:
        torch.set_default_dtype(default)
    return None if run.fault else {name: _narrow(fact) for name, fact in run.facts.items()}


def _narrow(fact: Fact) -> Fact:
    if fact.tensor is None or fact.tensor.dtype not in (torch.float64, torch.complex128):
        return fact
    dtype = torch.complex64 if fact.tensor.is_complex() else torch.float32
    return dataclasses.replace(fact, tensor=fact.tensor.to(dtype))


def _run(program: Program, number: int) -> Run:
    draw = _Signs(number)
    fault = None
    scope = vocabulary.names("cpu")
    given = set(scope)
    for line in program.lines:
        coarse = _coarsest(line.text, scope)
        fault = fault or attempt(line, scope)
        called = re.match(r"\w+ = (\w+)\(", line.text)
        module = scope.get(called[1]) if called is not None else None
        deviates = isinstance(module, _NORMS) or _DEVIATES.search(line.text) is not None
        module = isinstance(module, nn.Module)
        every = module or _ROUNDED.search(line.text) is not None
        changed = re.match(r"(?:with .*?: )?(\w+)", line.text)
        near = 40.0 if deviates else float(module or _CANCELS.search(line.text) is not None)
        signless = every or _SIGNLESS.search(line.text) is not None
        for name, value in scope.items():
            if name not in given and name[0] != "_":
                here = changed is not None and name == changed[1]
                kind = _Kind(every and here, signless and here, near * here, coarse * here)
                _disturb(value, draw, kind)
    return Run(dict(program.facts(scope, given)), fault)


class _Signs:
    """A sign for each element: all positive in the first run, all negative in the second.

    How far an element is taken is the same for all in these and the even runs, and drawn in the
    others: a program may see no difference between steps of one size, as
    `x.view(torch.int32) % 5` does not where they are five units in the last place.
    """

    def __init__(self, number: int):
        """`number`: of the run."""
        self.number = number
        self.random = torch.Generator().manual_seed(number)

    def __call__(self, shape: torch.Size) -> torch.Tensor:
        """Signs for an array of this shape."""
        if self.number < 2:
            return torch.full(shape, 1 - 2 * self.number)
        return torch.randint(0, 2, shape, generator=self.random) * 2 - 1

    def steps(self, signs: torch.Tensor) -> torch.Tensor:
        """How far to take each element, in units of the rounding error; at most one."""
        if self.number < 2 or self.number % 2 == 0:
            return signs
        return signs * torch.rand(signs.shape, generator=self.random)

    def flushed(self, shape: torch.Size) -> torch.Tensor:
        """Which elements become 0 if they are subnormal: all, none, or some."""
        if self.number < 4:
            return torch.full(shape, self.number in (0, 3))
        return torch.randint(0, 2, shape, generator=self.random) == 1


class _Kind(NamedTuple):
    """How a value is disturbed."""

    every: bool
    """Numbers that small halves give as well."""
    zeros: bool
    """The sign of zeros as well."""
    near: float
    """By an absolute amount as well: so many rounding errors."""
    eps: float
    """At least by so much, relatively."""


def _coarsest(line: str, scope: dict[str, Any]) -> float:
    """How much the coarsest dtype rounds that a line names, or reads from `scope`."""
    words = set(re.findall(r"\w+", line))
    named = [eps for dtype, eps in _EPS.items() if str(dtype).removeprefix("torch.") in words]
    return max([0.0, *named, *(_eps(value) for name, value in scope.items() if name in words)])


def _eps(value: Any) -> float:
    return _EPS.get(value.dtype, 0.0) if isinstance(value, torch.Tensor) else 0.0


def _disturb(value: Any, draw: _Signs, kind: _Kind) -> None:
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, nn.Module):
        tensors = list(value.parameters())
    tensors += [t.grad for t in tensors if is_leaf(t) is True and t.grad is not None]
    for tensor in tensors:
        eps = _eps(tensor) and max(_eps(tensor), kind.eps)
        if not eps or not tensor.numel() or 0 in tensor.stride():
            continue
        numbers = tensor.data
        signs = draw(numbers.shape)
        steps = draw.steps(signs).double()  # 1 + 2**-48 is 1 in float32
        moved = numbers * (1 + eps * steps)
        if kind.near:
            moved = moved + kind.near * eps * steps
        if not kind.every:
            parts = (
                torch.view_as_real(numbers.resolve_conj())
                if numbers.is_complex()
                else numbers[..., None]
            )
            # Beyond, every number of the dtype is such a multiple, and it says nothing of one.
            parts = parts.double()
            told = parts.abs() * torch.finfo(numbers.dtype).eps < 1 / 64
            exact = (told & (parts * 64 % 1 == 0)).all(-1)
            moved = torch.where(exact, numbers, moved)
        moved = moved.to(numbers.dtype)
        numbers.copy_(_with_signs(moved, signs, draw.flushed(numbers.shape), zeros=kind.zeros))


def _with_signs(
    numbers: torch.Tensor, signs: torch.Tensor, flushed: torch.Tensor, *, zeros: bool
) -> torch.Tensor:
    """Another sign for each NaN, and for each zero where asked for; subnormals may become 0."""
    if numbers.is_complex():
        parts = torch.view_as_real(numbers.resolve_conj())
        parts = _with_signs(parts, signs[..., None], flushed[..., None], zeros=zeros)
        return torch.view_as_complex(parts.contiguous())
    free = numbers.isnan() | ((numbers == 0) & zeros)
    subnormal = (numbers.abs() < torch.finfo(numbers.dtype).tiny) & flushed
    numbers = torch.where(subnormal, torch.zeros_like(numbers), numbers)
    return torch.where(free, torch.copysign(numbers, signs), numbers)


def allowed(want: torch.Tensor, runs: list[torch.Tensor]) -> torch.Tensor:
    """For each element, how far from `want` rounding can take it."""
    most = torch.zeros(want.shape, dtype=torch.float64)
    for run in runs:
        if run.shape != want.shape or run.dtype != want.dtype:
            return torch.full(want.shape, torch.inf, dtype=torch.float64)
        gap = distance(run, want)
        most = torch.maximum(most, gap)
    if want.is_floating_point() or want.is_complex():
        return most * FACTOR
    return torch.where(most > 0, torch.inf, 0.0)


def distance(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Element by element; 0 for two NaN or equal infinities, infinite where one is finite."""
    if not (one.is_floating_point() or one.is_complex()):
        gap = (one.to(torch.float64) - two.to(torch.float64)).abs()
        return torch.where(one == two, 0.0, gap.clamp(min=1.0))  # as floats large ones are equal
    if one.is_complex():
        both = zip(
            torch.view_as_real(one).unbind(-1), torch.view_as_real(two).unbind(-1), strict=True
        )
        gaps = [distance(a, b) for a, b in both]
        unclear = one.isnan() & two.isnan()
        return torch.where(unclear, 0.0, torch.maximum(*gaps))
    one, two = one.to(torch.float64), two.to(torch.float64)
    same = (one == two) | (one.isnan() & two.isnan())
    gap = (one - two).abs()
    return torch.where(same, 0.0, torch.where(gap.isnan(), torch.inf, gap))
