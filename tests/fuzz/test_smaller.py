"""What a program that differs is reduced to."""

from __future__ import annotations

import doctest

from tests.fuzz import smaller
from tests.fuzz.program import Line, Program
from tests.fuzz.smaller import smallest


def reduced(lines: str, wanted: float) -> str:
    """The smallest program that leaves `wanted` in `z`."""

    def differs(program: Program) -> bool:
        run = program.run("cpu")
        return run.fault is None and "z" in run.facts and run.facts["z"].shown == wanted

    return str(smallest(Program(tuple(map(Line, lines.splitlines()))), differs))


def test_examples():
    assert doctest.testmod(smaller) == (0, 3)


def test_unused_lines_go():
    assert reduced("a = 1\nb = 2\nz = b\nc = z", 2) == "b = 2\nz = b"


def test_a_variable_gives_way_to_what_it_was_made_from():
    assert reduced("a = 7\nb = +a\nc = +b\nz = -c", -7) == "a = 7\nz = -a"


def test_operations_give_way_to_operands():
    assert reduced("a = 2\nz = ((a + 1) * (a - 1)) + (a - 2)", 3) == "a = 2\nz = a + 1"


def test_several_rounds():
    """The last line has to give up `b` before the line that makes it can go."""
    assert reduced("a = 2\nb = a * 5\nz = abs(a) + (b - b)", 2) == "a = 2\nz = abs(a)"


def test_names_in_strings_and_attributes_stay():
    assert reduced("i = 'i'\nj = i.strip()\nz = j.count('j') + len(j)", 1) == "i = 'i'\nz = len(i)"


def test_a_refused_line_stays_refused():
    lines = Line("a = 0"), Line("b = +a"), Line("c = 1 / b", ZeroDivisionError)

    def differs(program: Program) -> bool:
        return program.run("cpu").fault is None and ZeroDivisionError in [
            line.raises for line in program.lines
        ]

    assert str(smallest(Program(lines), differs)) == "a = 0\nc = 1 / a  # ZeroDivisionError"


def test_it_stops_when_time_is_up():
    program = Program((Line("a = 1"), Line("b = 2")))
    assert smallest(program, lambda smaller: True, 0) == program
    assert smallest(program, lambda smaller: True) == Program(())
