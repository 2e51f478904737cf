"""Products of plans: the specs of one tensor, merged axis by axis.

>>> merged([P("tp"), P("fsdp", "ep")], 2, "w")
P(('tp', 'fsdp'), 'ep')
>>> merged([P(None, "tp"), P(None, "tp")], 2, "w")
P(None, 'tp')
>>> merged([P("tp"), P(None, "tp")], 2, "w")
Traceback (most recent call last):
    ...
isoshard.core.plan.layout_rules.PlanError: w: the factors of the plan disagree: mesh axis 'tp' splits axis 0 in P('tp',) and axis 1 in P(None, 'tp'). Give each factor mesh axes of its own.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from isoshard.core.layout.spec import axis_names

from .layout_rules import PlanError


def merged(specs: Sequence[P], ndim: int, name: str) -> P:
    """Merge specs of one tensor: each axis is split by all the mesh axes that any of them names.

    Args:
        specs: canonical, `P.UNCONSTRAINED` allowed; of two that split one axis, the first is the
            outer one.
        ndim: rank of the tensor.
        name: of the tensor, for messages.

    Returns:
        The spec, canonical. An axis that one spec leaves unconstrained is as the others have it.

    Raises:
        PlanError: a mesh axis splits different axes of the tensor.
    """
    if len(specs) == 1:
        return specs[0]
    axis_of: dict[str, tuple[int, P]] = {}
    errors: list[str] = []
    entries: list[Any] = []
    for axis in range(ndim):
        axis_entries = [spec[axis] if axis < len(spec) else None for spec in specs]
        split: list[str] = []
        for spec, entry in zip(specs, axis_entries, strict=True):
            for mesh_axis in () if entry is P.UNCONSTRAINED else axis_names(entry):
                first_axis, first = axis_of.setdefault(mesh_axis, (axis, spec))
                if first_axis != axis:
                    errors.append(
                        f"mesh axis {mesh_axis!r} splits axis {first_axis} in {first} and axis "
                        f"{axis} in {spec}"
                    )
                elif mesh_axis not in split:
                    split.append(mesh_axis)
        is_open = not split and all(entry is P.UNCONSTRAINED for entry in axis_entries)
        entries.append(P.UNCONSTRAINED if is_open else _entry(split))
    if errors:
        raise PlanError(
            f"{name}: the factors of the plan disagree: {'; '.join(errors)}. Give each factor "
            "mesh axes of its own."
        )
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def _entry(split: list[str]) -> str | tuple[str, ...] | None:
    return split[0] if len(split) == 1 else tuple(split) or None
