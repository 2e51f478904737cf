"""Words that identifiers, and phrases that messages and pages, do not use: docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

WORDS = frozenset(
    """
    alike apart asked asks beside born cut cuts fault faults foretold found given held known laid
    lie lies made mine nobody one piece pieces refused said slope slopes stay stays tell tells told
    twin twins verdict wanted whole
    """.split()
)
"""Words for which JAX and PyTorch have a noun: `leaf` for `one`, `shard` for `piece`, .."""

TERMS = re.compile(r"_?(?:one_hot|held_out|slopes?|found_inf|negative_slope)")
"""Identifiers that are the field's although a word of them is not: of curves, of operators."""

PHRASES = re.compile(
    r"\b(?:is told|are told|lies on|lie on|lies whole|lie whole|stays whole|way out|speaks? of"
    r"|says no|nobody|laid out|lay(?:s|ing)? (?:it|them) out|not here|foretold|lies in blocks)\b"
)
"""Phrases that mean: reports, is sharded over, is replicated, fix, has, no caller, sharded."""


def split(name: str) -> list[str]:
    """The words of an identifier, in small letters.

    >>> split("laid_out"), split("HeldPieces"), split("hlo")
    (['laid', 'out'], ['held', 'pieces'], ['hlo'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a source names itself: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, line
        elif isinstance(node, ast.arg):
            yield node.arg, line
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), line
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, line
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, line


def in_identifiers(tree: ast.AST) -> list[str]:
    """The identifiers of a source with a word of the dialect, with their lines.

    >>> in_identifiers(ast.parse("for one in leaves:\\n    found = one"))
    ['line 1: one', 'line 2: found']
    """
    return [
        f"line {line}: {name}"
        for name, line in identifiers(tree)
        if WORDS & {*split(name)} and not TERMS.fullmatch(name.lower())
    ]


def messages(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The texts of what a source raises and warns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            texts = [x for x in ast.walk(node.exc) if isinstance(x, ast.Constant)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn"):
            texts = [x for x in ast.walk(node) if isinstance(x, ast.Constant)]
        else:
            continue
        yield "".join(str(x.value) for x in texts if isinstance(x.value, str)), node.lineno


def in_messages(tree: ast.AST) -> list[str]:
    """The phrases of the dialect in the messages of a source, with their lines.

    >>> in_messages(ast.parse("raise ValueError(f'{x} lies on no mesh')"))
    ['line 1: lies on']
    """
    return [
        f"line {line}: {phrase}"
        for text, line in messages(tree)
        for phrase in PHRASES.findall(text)
    ]


def in_page(path: Path) -> list[str]:
    """The phrases of the dialect in a page, with their lines."""
    lines = path.read_text().splitlines()
    return [
        f"{path.name}:{number}: {phrase}"
        for number, line in enumerate(lines, 1)
        for phrase in PHRASES.findall(line)
    ]
