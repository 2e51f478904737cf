"""HLO's text as instructions: shapes, arguments, elements of tuples."""

from __future__ import annotations

import pytest

from isoshard.core.runtime.hlo_text import ArrayShape, arrays_of, parsed


def test_shapes_know_their_bytes_and_their_memory():
    found = arrays_of("(bf16[2,<=8]{1,0:T(8,128)(2,1)S(1)}, pred[], u4[6]{0}, token[])")
    assert found == (
        ArrayShape("bf16", (2, 8), 1),
        ArrayShape("pred", ()),
        ArrayShape("u4", (6,)),
        ArrayShape("token", ()),
    )
    assert [one.bytes for one in found] == [32, 1, 3, 0]


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
