"""Where a small change of a function's source makes a mutant: a comparison turned, a call left out.

>>> source = "def least(a, b):\\n    return a if a < b else b\\n"
>>> [(site.kind, site.old, site.new) for site in sites(source)[1:]]
[('negate', 'a < b', 'not (a < b)'), ('compare', 'a < b', 'a <= b')]
>>> changed(source, sites(source)[2]).splitlines()[1]
'    return a if a <= b else b'
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Node = ast.stmt | ast.expr | ast.keyword


class Site(NamedTuple):
    """One possible change.

    Attributes:
        function: qualified name of the innermost function around it.
        kind: of change.
        ordinal: counts the sites of this kind in this function.
        old: source of the statement or expression that changes.
        new: what stands there in the mutant.
        start: where it begins in the file, in bytes.
        statement: whether it is a statement.
    """

    function: str
    kind: str
    ordinal: int
    old: str
    new: str
    start: int
    statement: bool


def sites(source: str) -> list[Site]:
    """All sites in the functions of a module; none in docstrings, messages and annotations.

    Args:
        source: of the module.
    """
    text = _Text(source)
    results: list[Site] = []
    counts: dict[tuple[str, str], int] = {}
    for function, node in _nodes(ast.parse(source), (), within=False):
        for change, kind, new in _of(node, text):
            ordinal = counts.get((function, kind), 0)
            counts[function, kind] = ordinal + 1
            start, _ = text.span(change)
            site = Site(
                function, kind, ordinal, text[change], new, start, isinstance(change, ast.stmt)
            )
            if new != site.old:
                results.append(site)
    return results


def changed(source: str, site: Site, new: str | None = None) -> str:
    """The module with a site's change.

    Args:
        source: of the module.
        site: of `sites(source)`.
        new: what is written there; none for the site's own change.
    """
    before = source.encode()
    middle = (site.new if new is None else new).encode()
    return (before[: site.start] + middle + before[site.start + len(site.old.encode()) :]).decode()


def is_program(source: str) -> bool:
    """Whether Python takes it: a change may not, such as one argument by name before others."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


class _Text:
    """The source of nodes, whose columns are bytes."""

    def __init__(self, source: str) -> None:
        self.bytes = source.encode()
        self.lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: _Node) -> tuple[int, int]:
        start = self.lines[node.lineno - 1] + node.col_offset
        return start, self.lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def __getitem__(self, node: _Node) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def swapped(self, node: _Node, left: _Node, right: _Node, tokens: tuple[str, str]) -> str:
        """The expression with another operator between these two."""
        start, end = self.span(node)
        begin, stop = self.span(left)[1], self.span(right)[0]
        between = self.bytes[begin:stop].decode().replace(*tokens, 1)
        return self.bytes[start:begin].decode() + between + self.bytes[stop:end].decode()


def _nodes(node: ast.AST, names: tuple[str, ...], within: bool) -> Iterator[tuple[str, ast.AST]]:
    """The nodes that execute when a function is called, with its name."""
    if within:
        yield ".".join(names), node
    children = ast.iter_child_nodes(node)
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):  # without decorators and defaults
        names, within, children = (*names, node.name), isinstance(node, _FUNCTIONS), iter(node.body)
    for child in children:
        if not _is_silent(child) and child is not getattr(node, "annotation", None):
            yield from _nodes(child, names, within)


def _is_silent(node: ast.AST) -> bool:
    """Whether nothing but a text depends on it."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _of(node: ast.AST, text: _Text) -> Iterator[tuple[_Node, str, str]]:
    """The changes of one node: what is replaced, the kind, and by what."""
    match node:
        case ast.Return(value=ast.expr()):
            yield node, "return", "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "statement", "pass"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test, *_]):
            yield test, "negate", f"not ({text[test]})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield node, "compare", text.swapped(node, left, right, _COMPARISONS[type(op)])
        case ast.BoolOp(op=op, values=[first, second, *_]):
            yield node, "boolean", text.swapped(node, first, second, _BOOLEAN[type(op)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            yield node, "arithmetic", text.swapped(node, left, right, _ARITHMETIC[type(op)])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "not", f"({text[operand]})"
        case ast.Constant(value=bool() as value):
            yield node, "constant", str(not value)
        case ast.Constant(value=int() as value):
            yield node, "constant", str(value + 1)
        case ast.keyword(arg=str()):
            yield node, "keyword", "**{}"
