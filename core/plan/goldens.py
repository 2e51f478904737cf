"""Golden files: a resolved plan as JSON, one leaf a line, so that a change is a diff of lines.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> resolved = Plan({"w": P(None, ("x", "y"))}).resolve({"w": (4, 8)}, make_mesh((2, 4), ("x", "y")))
>>> print(to_json(resolved), end="")
{
  "mesh": {"x": 2, "y": 4},
  "leaves": [
    {"name": "w", "shape": [4, 8], "dtype": null, "spec": [null, ["x", "y"]], "bytes": 16, "rule": "w"}
  ],
  "activations": [],
  "unused": []
}
>>> type(resolved).from_json(to_json(resolved)).specs
{'w': P(None, ('x', 'y'))}
"""  # noqa: E501

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.offload import is_offloaded

from .layout_rules import PlanError
from .resolved_leaves import ResolvedActivation, ResolvedLeaf

if TYPE_CHECKING:
    from .resolved import ResolvedPlan


def to_json(resolved: ResolvedPlan) -> str:
    """Write a layout; see `ResolvedPlan.to_json`."""
    fields = {
        "mesh": json.dumps(dict(resolved.mesh.shape)),
        "leaves": _lines([_leaf_json(leaf) for leaf in resolved.leaves]),
        "activations": _lines([vars(row) for row in resolved.activations]),
        "unused": json.dumps(list(resolved.unused)),
    }
    body = ",\n".join(f"  {json.dumps(key)}: {text}" for key, text in fields.items())
    return f"{{\n{body}\n}}\n"


def fields_of(text: str) -> tuple[Any, ...]:
    """Read the fields of a `ResolvedPlan`; see `ResolvedPlan.from_json`."""
    try:
        read = json.loads(text)
        sizes = tuple(read["mesh"].values())
        # explicitly, since abstract meshes are Explicit by default from JAX 0.11 on
        mesh = AbstractMesh(sizes, tuple(read["mesh"]), axis_types=(AxisType.Auto,) * len(sizes))
        return (
            tuple(_leaf(entry, mesh) for entry in read["leaves"]),
            mesh,
            tuple(read["unused"]),
            tuple(ResolvedActivation(**entry) for entry in read["activations"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"this is not JSON that ResolvedPlan.to_json wrote: {type(error).__name__}: {error}"
        ) from None


def text_of(golden: Any) -> tuple[str, str]:
    """The JSON of a golden file, and its name in messages.

    Args:
        golden: a path, or the JSON itself as text that starts with "{".

    Raises:
        PlanError: there is no such file.
    """
    if isinstance(golden, str) and golden.lstrip().startswith("{"):
        return golden, "the golden"
    if not Path(golden).is_file():
        raise PlanError(f"there is no golden file {golden}; {_HOW}")
    return Path(golden).read_text(), str(golden)


def check(golden: ResolvedPlan, resolved: ResolvedPlan, where: str) -> None:
    """Compare a resolved plan with its golden; see `ResolvedPlan.check_golden`."""
    diff = golden.diff(resolved)
    lines = [f"  {change}" for change in (*diff.changed, *diff.renamed_rules)]
    for field, a, b in (
        ("mesh", dict(golden.mesh.shape), dict(resolved.mesh.shape)),
        ("unused rules", golden.unused, resolved.unused),
    ):
        if a != b or list(a) != list(b):
            lines.append(f"  {field}: {a} -> {b}")
    lines += _activation_lines(golden, resolved)
    if lines:
        raise PlanError("\n".join([f"the layout is not that of {where}:", *lines, _HOW]))


_HOW = "if the change is intended, write it: path.write_text(resolved.to_json())"


def _activation_lines(golden: ResolvedPlan, resolved: ResolvedPlan) -> list[str]:
    before, after = (
        {(row.module, row.side): f"{row.spec} [rule {row.rule!r}]" for row in plan.activations}
        for plan in (golden, resolved)
    )
    return [
        f"  {side} of module {module!r}: "
        f"{before.get((module, side), 'nothing')} -> {after.get((module, side), 'nothing')}"
        for module, side in dict.fromkeys([*before, *after])
        if before.get((module, side)) != after.get((module, side))
    ]


def _leaf_json(leaf: ResolvedLeaf) -> dict[str, Any]:
    entries = [list(e) if isinstance(e, tuple) else e for e in leaf.sharding.spec]
    fields = {
        "name": leaf.name,
        "shape": leaf.shape,
        "dtype": leaf.dtype,
        "spec": entries,
        "bytes": leaf.bytes_per_device,
        "rule": leaf.rule,
    }
    if is_offloaded(leaf.sharding):
        fields["memory"] = leaf.sharding.memory_kind
    return {**fields, "notes": leaf.notes} if leaf.notes else fields


def _leaf(entry: dict[str, Any], mesh: AbstractMesh) -> ResolvedLeaf:
    spec = P(*(tuple(e) if isinstance(e, list) else e for e in entry["spec"]))
    return ResolvedLeaf(
        entry["name"],
        tuple(entry["shape"]),
        entry["dtype"],
        NamedSharding(mesh, spec, memory_kind=entry.get("memory")),
        entry["bytes"],
        entry["rule"],
        tuple(entry.get("notes", ())),
    )


def _lines(entries: list[dict[str, Any]]) -> str:
    if not entries:
        return "[]"
    return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in entries) + "\n  ]"
