"""HLO's text: programs of this host, of a TPU and of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from isoshard.core.runtime.hlo_text import parsed
from isoshard.planner.programs.device_ops import line_of
from isoshard.planner.programs.hlo_costs import Costs

RECORDED = Path(__file__).with_name("recorded")
"""Programs of `sample_steps.layers` on 2 x 2 devices: of libtpu 0.0.52, jax-cuda12-plugin 0.10.2
and jaxlib 0.10.2, without configurations of single kernels."""

TABLES = """
HloModule step, is_scheduled=true

FileNames
1 "/venv/lib/python3.12/site-packages/flax/nnx/module.py"
2 "/home/me/train.py"

FunctionNames
1 "Linear.__call__"
2 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=4 end_column=8}
2 {file_name_id=2 function_name_id=2 line=12 end_line=12 column=4 end_column=8}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %inner = f32[8]{0} negate(%p), metadata={op_name="jit(f)/neg" stack_frame_id=2}
  %old = f32[8]{0} negate(%inner), metadata={op_name="x" source_file="/home/me/a.py" source_line=3}
  ROOT %said = f32[8]{0} add(%old, %p), metadata={op_name="transpose(jvp(b|c.py:4 (f)))/mul"}
}
"""


def total(ops):
    """Flops and bytes of one step."""
    return Costs(sum(o.flops * o.times for o in ops), sum(o.bytes * o.times for o in ops), "")


def read(name):
    return parsed((RECORDED / f"{name}.hlo").read_text())


def test_lines_come_from_scopes_from_frames_and_from_files():
    module = parsed(TABLES)
    lines = {name: line_of(module, one) for name, one in module.entry.instructions.items()}
    assert lines == {
        "p": "",
        "inner": "train.py:12 (loss)",
        "old": "a.py:3",
        "said": "b/c.py:4 (f)",
    }


@pytest.mark.parametrize(("name", "sizes"), [("host", 3), ("h100", 3), ("v5e", 3)])
def test_programs_of_three_compilers_are_read(name, sizes):
    module = read(name)
    assert module.scheduled
    assert len(module.entry.parameters) == sizes
    assert module.aliased == {0: 0, 1: 1}
    called = {n for one in module.entry.instructions.values() for n in one.called}
    assert called and called <= set(module.computations)
    for body in module.computations.values():
        for one in body.instructions.values():
            assert set(one.operands) <= set(body.instructions), one.name
