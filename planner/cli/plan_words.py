"""Plans and axes in a word: what `--plan fsdp,tensor --axes data=16,model=16` stands for.

>>> axes = {"data": 16, "model": 16}
>>> plan_of("data", axes)
Plan({}, default=None, inputs={'*': ('data',)})
>>> written = plan_of("fsdp,tensor", axes)
>>> written.spec_for("layers.0.mlp.up_proj.weight", (14336, 4096), abstract_mesh(axes))
P('model', 'data')

Each word takes the axis that is called so, or the first (`data`, `fsdp`) or last (the others) of
the mesh. `fsdp=pod+data,tensor=model` names the axes.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping

from jax.sharding import AbstractMesh

from isoshard.core.kit import CodedError, Order, Plan
from isoshard.planner.machine.topologies import Topology

WORDS: dict[str, tuple[str, ...]] = {
    "data": ("data", "dp", "batch", "replica"),
    "fsdp": ("fsdp", "data", "dp", "batch"),
    "tensor": ("tensor", "tp", "model", "mp"),
    "sequence": ("sequence", "sp", "tensor", "tp", "model", "mp"),
    "expert": ("expert", "ep", "experts", "model", "mp"),
}
"""Words for plans, and the names of axes that each looks for, in this order."""

_BATCH = ("data", "fsdp")
_SHARED = ({"data", "fsdp"}, {"tensor", "sequence"})  # may use one axis together
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class PlanCommandError(CodedError, code="ISO045"):
    """What was asked for on the command line cannot be done; the message says what can."""


def is_words(text: str) -> bool:
    """Whether a `--plan` is words, rather than `auto` or a name in a script."""
    return text != "auto" and ":" not in text


def abstract_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    """A mesh without devices."""
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def plan_of(text: str, axes: Mapping[str, int], weights: Order = "out_in") -> Plan:
    """Put a plan together.

    Args:
        text: words, with commas between; each may name its axes, as in "fsdp=pod+data".
        axes: of the mesh.
        weights: the order of the axes of a `weight`, as of `Plan.tensor_parallel`.

    Raises:
        PlanCommandError: a word or an axis is unknown, or two words want one axis.
    """
    target = _wanted(text, axes)
    factors = []
    for word, along in target.items():
        axis = along[0] if len(along) == 1 else along
        if word == "data" and set(along) <= set(target.get("fsdp", ())):
            continue
        if word == "tensor":
            factors.append(Plan.tensor_parallel(axis, weights=weights))
        elif word == "data":
            factors.append(Plan.data_parallel(axis))
        elif word == "fsdp":
            factors.append(Plan.fsdp(axis))
        elif word == "sequence":
            factors.append(Plan.sequence_parallel(axis))
        else:
            factors.append(Plan.expert_parallel(axis))
    batch = [name for word in _BATCH for name in target.get(word, ())]
    if batch and len(set(target) - set(_BATCH)) > 0:
        names = tuple(dict.fromkeys(batch))
        factors.append(Plan.batch_activations(names[0] if len(names) == 1 else names))
    plan = factors[0]
    for factor in factors[1:]:
        plan = plan * factor
    return plan


def spelled(text: str, axes: Mapping[str, int]) -> str:
    """A plan in words, each with its axes.

    Example:
        >>> spelled("fsdp,tensor", {"data": 16, "model": 16})
        'fsdp=data,tensor=model'
    """
    return ",".join(f"{word}={'+'.join(along)}" for word, along in _wanted(text, axes).items())


def axes_of(text: str | None, machine: Topology, plan: str | None) -> dict[str, int]:
    """The axes of the mesh.

    Args:
        text: as in "data=16,model=16"; one size may be missing, as in "data,model=16". None: all
            devices along "data", or, where the plan splits layers too, the last part of the
            machine's grid along "model".
        machine: what the mesh is over.
        plan: the words of the plan, if it is given by words.

    Raises:
        PlanCommandError: it is written otherwise, or the machine has other devices.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> axes_of("data,model=8", topology("v5e:16x16"), None)
        {'data': 32, 'model': 8}
        >>> axes_of(None, topology("h100:4x8"), "fsdp,tensor")
        {'data': 4, 'model': 8}
    """
    if text is None:
        words = {axis.partition("=")[0] for axis in (plan or "").split(",")}
        last = machine.shape[-1]
        if not words - set(_BATCH) & set(WORDS) or last == 1:
            return {"data": machine.size}
        if machine.size == last:
            last = next((n for n in (8, 4, 2) if machine.size % n == 0 and n < last), last)
        return {"data": machine.size // last, "model": last}
    axes: dict[str, int] = {}
    open_axis = None
    for axis in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*(?:=\s*(\d+)\s*)?", axis)
        if match is None or match[1] in axes or (not match[2] and open_axis) or match[2] == "0":
            raise PlanCommandError(
                f"--axes {text!r}: write each axis once with its size, as in data=16,model=16; "
                "one size may be left out"
            )
        axes[match[1]] = int(match[2] or 1)
        open_axis = open_axis if match[2] else match[1]
    if open_axis:
        rest = math.prod(axes.values())
        if machine.size % rest:
            raise PlanCommandError(
                f"--axes {text!r}: {machine.size} devices of {machine.name} do not divide by {rest}"
            )
        axes[open_axis] = machine.size // rest
    if math.prod(axes.values()) > machine.size:
        raise PlanCommandError(
            f"--axes {text!r} has {math.prod(axes.values())} devices, and {machine.name} has "
            f"{machine.size}"
        )
    return axes


def bytes_of(text: str) -> int:
    """Read a size of memory.

    Raises:
        PlanCommandError: it is written otherwise.

    Example:
        >>> bytes_of("16GB"), bytes_of("16 GiB"), bytes_of("1.5G")
        (16000000000, 17179869184, 1500000000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise PlanCommandError(f"--memory {text!r}: write a size such as 16GB or 16GiB")
    if not float(match[1]):
        raise PlanCommandError(f"--memory {text!r}: a device needs memory")
    unit = match[2].upper()
    scale = 1024 ** "KMGT".index(unit) * 1024 if match[3] else _SIZES[unit]
    return round(float(match[1]) * scale)


def _wanted(text: str, axes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Words and the axes that they take."""
    target: dict[str, tuple[str, ...]] = {}
    for axis in text.split(","):
        word, named, along = (chunk.strip() for chunk in axis.partition("="))
        if word not in WORDS:
            close = difflib.get_close_matches(word, [*WORDS, "auto"], n=1)
            raise PlanCommandError(
                f"--plan {text!r}: no plan is called {word!r}"
                f"{f', did you mean {close[0]!r}?' if close else '.'} There are "
                f"{', '.join(WORDS)}, with commas between, auto, and a plan of a script: "
                "script.py:my_plan"
            )
        if word in target:
            raise PlanCommandError(f"--plan {text!r} says {word!r} twice")
        names = tuple(along.split("+")) if named else _by_name(word, axes)
        if unknown := [name for name in names if name not in axes]:
            raise PlanCommandError(
                f"--plan {text!r}: the mesh has no axis {unknown[0]!r}; its axes are "
                f"{', '.join(axes)}"
            )
        target[word] = names
    for first in target:
        for second in target:
            both = set(target[first]) & set(target[second])
            if first < second and both and {first, second} not in _SHARED:
                raise PlanCommandError(
                    f"--plan {text!r}: {first} and {second} both take axis {both.pop()!r} of "
                    f"{', '.join(axes)}; give the mesh more axes (--axes data=..,model=..), or "
                    f"name them ({first}=..,{second}=..)"
                )
    return target


def _by_name(word: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    for name in WORDS[word]:
        if name in axes:
            return (name,)
    return (next(iter(axes)) if word in _BATCH else list(axes)[-1],)
