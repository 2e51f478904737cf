"""HLO's text: programs of this host, of a TPU and of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from isoshard.planner.programs.hlo_text import ArrayShape, arrays_of, parsed

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
  ROOT %said = f32[8]{0} add(%old, %p), metadata={op_name="transpose(jvp(line:b|c.py:4 (f)))/mul"}
}
"""


def read(name):
    return parsed((RECORDED / f"{name}.hlo").read_text())


def test_lines_come_from_scopes_from_frames_and_from_files():
    module = parsed(TABLES)
    lines = {name: module.line_of(one) for name, one in module.entry.instructions.items()}
    assert lines == {
        "p": "",
        "inner": "train.py:12 (loss)",
        "old": "a.py:3",
        "said": "b/c.py:4 (f)",
    }


def test_shapes_know_their_bytes_and_their_memory():
    found = arrays_of("(bf16[2,<=8]{1,0:T(8,128)(2,1)S(1)}, pred[], u4[6]{0}, token[])")
    assert found == (
        ArrayShape("bf16", (2, 8), 1),
        ArrayShape("pred", ()),
        ArrayShape("u4", (6,)),
        ArrayShape("token", ()),
    )
    assert [one.bytes for one in found] == [32, 1, 3, 0]


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


def test_arguments_with_parentheses_and_comments():
    module = parsed(
        "HloModule m\n"
        "%f (a: f32[2]) -> f32[2] {\n"
        "  ROOT %a = f32[2]{0} parameter(0)\n"
        "}\n"
        "ENTRY %main (p: (f32[2], f32[2])) -> f32[2] {\n"
        "  %p = (f32[2]{0}, /*index=1*/f32[2]{0}) parameter(0)\n"
        "  %g = f32[2]{0} get-tuple-element((f32[2]{0}, f32[2]{0}) %p), index=1\n"
        '  ROOT %c = f32[2]{0} call(%g), to_apply=%f, metadata={op_name="a(b)"}\n'
        "}\n"
    )
    assert module.root.called == ("f",)
    assert module.entry.instructions["g"].operands == ("p",)
    assert len(module.entry.parameters[0].arrays) == 2


def test_elements_of_tuples_that_have_no_line():
    """XLA 0.12 dumps them so; 0.10 writes a line for each, as the other module here."""
    head = "HloModule m\nENTRY %main (p: (f32[2], (f32[4], f32[8]))) -> f32[8] {\n"
    head += "  %p = (f32[2]{0}, (f32[4]{0}, f32[8]{0})) parameter(0)\n"
    short = parsed(head + "  ROOT %c = f32[8]{0} add(%p#1#1, %p#1#1)\n}\n").entry
    full = parsed(
        head + "  %a = (f32[4]{0}, f32[8]{0}) get-tuple-element(%p), index=1\n"
        "  %b = f32[8]{0} get-tuple-element(%a), index=1\n"
        "  ROOT %c = f32[8]{0} add(%b, %b)\n}\n"
    ).entry
    rows = [
        [(i.opcode, i.shape, i.attributes) for i in e.instructions.values()] for e in (short, full)
    ]
    assert rows[0] == rows[1]
    outer, inner, last = list(short.instructions.values())[1:]
    assert (outer.operands, inner.operands) == (("p",), (outer.name,))
    assert last.operands == (inner.name,) * 2 and last.arguments == f"%{inner.name}, %{inner.name}"


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no entry computation"):
        parsed("HloModule m\n")
