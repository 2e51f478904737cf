"""Plans and axes by name: the meaning of `--plan fsdp,tensor --axes data=16,model=16`.

>>> axes = {"data": 16, "model": 16}
>>> plan_of("data", axes)
Plan({}, default=None, inputs={'*': ('data',)})
>>> written = plan_of("fsdp,tensor", axes)
>>> written.spec_for("layers.0.mlp.up_proj.weight", (14336, 4096), abstract_mesh(axes))
P('model', 'data')

Each strategy uses the axis of its name, or the first (`data`, `fsdp`) or last (the others) of the
mesh. `fsdp=pod+data,tensor=model` names the axes.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping

from jax.sharding import AbstractMesh

from isoshard.core.kit import CodedError, Order, Plan
from isoshard.planner.machine.topologies import Topology

STRATEGIES: dict[str, tuple[str, ...]] = {
    "data": ("data", "dp", "batch", "replica"),
    "fsdp": ("fsdp", "data", "dp", "batch"),
    "tensor": ("tensor", "tp", "model", "mp"),
    "sequence": ("sequence", "sp", "tensor", "tp", "model", "mp"),
    "expert": ("expert", "ep", "experts", "model", "mp"),
}
"""Names of strategies, and the names of axes that each looks for, in this order."""

_BATCH = ("data", "fsdp")
_SHARED = ({"data", "fsdp"}, {"tensor", "sequence"})  # may use one axis together
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class PlanCommandError(CodedError, code="ISO045"):
    """An argument of the command line is invalid; the message says what is supported."""


def is_strategies(text: str) -> bool:
    """Whether a `--plan` is names of strategies, not `auto` or a name in a script."""
    return text != "auto" and ":" not in text


def abstract_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    """A mesh without devices."""
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def plan_of(text: str, axes: Mapping[str, int], weights: Order = "out_in") -> Plan:
    """The plan of some strategies.

    Args:
        text: names, separated by commas; each may name its axes, as in "fsdp=pod+data".
        axes: of the mesh.
        weights: the order of the axes of a `weight`, as of `Plan.tensor_parallel`.

    Raises:
        PlanCommandError: a strategy or an axis is unknown, or two strategies use one axis.
    """
    target = _axes_by_strategy(text, axes)
    factors = []
    for strategy, chosen in target.items():
        axis = chosen[0] if len(chosen) == 1 else chosen
        if strategy == "data" and set(chosen) <= set(target.get("fsdp", ())):
            continue
        if strategy == "tensor":
            factors.append(Plan.tensor_parallel(axis, weights=weights))
        elif strategy == "data":
            factors.append(Plan.data_parallel(axis))
        elif strategy == "fsdp":
            factors.append(Plan.fsdp(axis))
        elif strategy == "sequence":
            factors.append(Plan.sequence_parallel(axis))
        else:
            factors.append(Plan.expert_parallel(axis))
    batch = [name for strategy in _BATCH for name in target.get(strategy, ())]
    if batch and len(set(target) - set(_BATCH)) > 0:
        names = tuple(dict.fromkeys(batch))
        factors.append(Plan.batch_activations(names[0] if len(names) == 1 else names))
    plan = factors[0]
    for factor in factors[1:]:
        plan = plan * factor
    return plan


def spelled(text: str, axes: Mapping[str, int]) -> str:
    """The strategies of a plan, each with its axes.

    Example:
        >>> spelled("fsdp,tensor", {"data": 16, "model": 16})
        'fsdp=data,tensor=model'
    """
    by_strategy = _axes_by_strategy(text, axes)
    return ",".join(f"{strategy}={'+'.join(names)}" for strategy, names in by_strategy.items())


def axes_of(text: str | None, machine: Topology, plan: str | None) -> dict[str, int]:
    """The axes of the mesh.

    Args:
        text: as in "data=16,model=16"; one size may be missing, as in "data,model=16". None: all
            devices along "data", or, where the plan splits layers too, the last axis of the
            machine's grid along "model".
        machine: of the mesh.
        plan: the strategies of the plan, if it is given by name.

    Raises:
        PlanCommandError: the text is invalid, or the machine has other devices.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> axes_of("data,model=8", topology("v5e:16x16"), None)
        {'data': 32, 'model': 8}
        >>> axes_of(None, topology("h100:4x8"), "fsdp,tensor")
        {'data': 4, 'model': 8}
    """
    if text is None:
        strategies = {axis.partition("=")[0] for axis in (plan or "").split(",")}
        last = machine.shape[-1]
        if not strategies - set(_BATCH) & set(STRATEGIES) or last == 1:
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
        PlanCommandError: the text is invalid.

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


def _axes_by_strategy(text: str, axes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The strategies of a text and their axes."""
    target: dict[str, tuple[str, ...]] = {}
    for term in text.split(","):
        strategy, has_names, names_text = (chunk.strip() for chunk in term.partition("="))
        if strategy not in STRATEGIES:
            close = difflib.get_close_matches(strategy, [*STRATEGIES, "auto"], n=1)
            raise PlanCommandError(
                f"--plan {text!r}: no plan is called {strategy!r}"
                f"{f', did you mean {close[0]!r}?' if close else '.'} There are "
                f"{', '.join(STRATEGIES)}, with commas between, auto, and a plan of a script: "
                "script.py:my_plan"
            )
        if strategy in target:
            raise PlanCommandError(f"--plan {text!r} has {strategy!r} twice")
        names = tuple(names_text.split("+")) if has_names else _by_name(strategy, axes)
        if unknown := [name for name in names if name not in axes]:
            raise PlanCommandError(
                f"--plan {text!r}: the mesh has no axis {unknown[0]!r}; its axes are "
                f"{', '.join(axes)}"
            )
        target[strategy] = names
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


def _by_name(strategy: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    for name in STRATEGIES[strategy]:
        if name in axes:
            return (name,)
    return (next(iter(axes)) if strategy in _BATCH else list(axes)[-1],)
