"""Every program that a script of torch_xla runs, written to a file.

`XLA_SAVE_TENSORS_FILE=/tmp/graphs` lets `drop_in.install` begin it: each execution appends to
`/tmp/graphs.0` (the number is the process's) the operations that were recorded, or with
`XLA_SAVE_TENSORS_FMT=hlo` the HLO that XLA made of them, and the layout of each result.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

from isoshard.core.kit import metrics
from isoshard.torch_bridge.kit import RECIPES, marks, program, sharding_ids

from .lowered import short

_FORMATS = ("text", "hlo")


def begin() -> None:
    """Write programs from now on, if `XLA_SAVE_TENSORS_FILE` is set."""
    path = os.environ.get("XLA_SAVE_TENSORS_FILE")
    form = os.environ.get("XLA_SAVE_TENSORS_FMT", "text")
    if not path:
        return
    if form not in _FORMATS:
        raise ValueError(f"XLA_SAVE_TENSORS_FMT is {form!r}, and isoshard writes text and hlo")

    def save(done: program.Program, plan: program.CompileRequest) -> None:
        with Path(f"{path}.{jax.process_index()}").open("a") as file:
            file.write(_graph(plan) if form == "text" else _compiled(done))

    program.WATCHING.append(save)


def _graph(plan: program.CompileRequest) -> str:
    """The recorded operations of a program."""
    names = [RECIPES[e[0]].name if isinstance(e[0], int) else "input" for e in plan.program]
    return _entry("\n".join(["IR {", *(f"  {name}" for name in names), "}"]))


def _compiled(done: program.Program) -> str:
    """What XLA made of a program, and how its results are sharded."""
    shapes = jax.tree.leaves(done.compiled.out_info)
    lines = [
        f"{short(struct.dtype, struct.shape)} {_layout(layout_id, len(struct.shape))}"
        for struct, layout_id in zip(shapes, done.layouts or (), strict=True)
    ]
    outputs = ["#OUTPUT_SHARDING_BEGIN", *lines, "#OUTPUT_SHARDING_END", "", ""]
    return _entry(done.text()) + "\n".join(outputs)


def _entry(text: str) -> str:
    where = f"TensorsGraphInfo:\n  {metrics.user_location()}\n"
    return f"{where}\n## BEGIN_GRAPH\n{text.rstrip()}\n## END_GRAPH\n\n"


def _layout(layout_id: int, ndim: int) -> str:
    layout = None if layout_id == sharding_ids.UNPLACED else sharding_ids.as_named(layout_id)
    if isinstance(layout, jax.sharding.NamedSharding):
        return marks.spec_string(layout, ndim)
    return "{replicated}"  # as XLA writes the layout of an array on one device
