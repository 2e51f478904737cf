"""Making a program that differs smaller, line by line.

Where a line cannot go because later ones use what it makes, they may use what it was made from:

>>> lines = "a = 3", "b = abs(a)", "d = b * 2", "c = b + 1"
>>> def gives_4(program):
...     fact = program.run("cpu").facts.get("c")
...     return fact is not None and fact.shown == 4
>>> print(smallest(Program(tuple(map(Line, lines))), gives_4))
a = 3
c = a + 1
"""

from __future__ import annotations

import ast
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

from .program import Line, Program


def smallest(
    program: Program, differs: Callable[[Program], bool], seconds: float = math.inf
) -> Program:
    """The smallest program that differs, of those that one change after another leads to.

    Args:
        program: differs.
        differs: says whether another one does; a program that cannot run does not.
        seconds: to look for it; then it is the smallest one so far.
    """
    stop = time.monotonic() + seconds
    before = None
    while program != before:
        before = program
        for place in reversed(range(len(program.lines))):
            for simpler in _simpler(program, place):
                if time.monotonic() > stop:
                    return program
                if differs(simpler):
                    program = simpler
                    break
    return program


def _simpler(program: Program, place: int) -> Iterator[Program]:
    """The program without a line, and with a line that does less."""
    before, line, after = program.lines[:place], program.lines[place], program.lines[place + 1 :]
    yield Program((*before, *after))
    (statement,) = ast.parse(line.text).body
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        made = {name for earlier in before for name in _targets(earlier)}
        for name in dict.fromkeys(name for name in _names(statement.value) if name in made):
            rename = _Rename(statement.targets[0].id, name)
            yield Program((*before, *(_changed(other, rename) for other in after)))
    for number in range(sum(isinstance(node, ast.BinOp) for node in ast.walk(statement))):
        for side in "left", "right":
            yield Program((*before, _changed(line, _Operand(number, side)), *after))


def _targets(line: Line) -> Iterator[str]:
    """The variables that a line makes."""
    for statement in ast.parse(line.text).body:
        if isinstance(statement, ast.Assign):
            yield from (node.id for node in statement.targets if isinstance(node, ast.Name))


def _names(expression: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))


def _changed(line: Line, change: ast.NodeTransformer) -> Line:
    tree = ast.parse(line.text)
    before = ast.unparse(tree)
    after = ast.unparse(change.visit(tree))
    return line if after == before else dataclasses.replace(line, text=after)


class _Rename(ast.NodeTransformer):
    """Puts one variable in the place of another."""

    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.new, node.ctx) if node.id == self.old else node


class _Operand(ast.NodeTransformer):
    """Puts an operand in the place of the binary operation with this number."""

    def __init__(self, number: int, side: str):
        self.number, self.side = number, side

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.number -= 1
        return getattr(node, self.side) if self.number == -1 else self.generic_visit(node)
