"""A test file as it is read here: imports renamed, and assertions of some kinds noted.

>>> print(ast.unparse(renamed("from torch.distributed._tensor import Shard as S", "x.py")))
S = __suite__.named('torch.distributed._tensor', 'Shard')
>>> print(ast.unparse(renamed("self.assertEqual(comm_mode.get_total_counts(), 1)", "x.py")))
with __suite__.noted('counts'):
    self.assertEqual(comm_mode.get_total_counts(), 1)

Nothing is written anywhere, and the lines keep their numbers.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from . import names, rank_zero
from .common import noted
from .differences import DECIDED, OWN_TENSORS

_KINDS = {
    "counts": r"comm_counts|get_total_counts|_counts\b|comm_mode|fwd_mode|bwd_mode",
    "placements": r"\.placements\b|\.is_partial\(|\.is_replicate\(|\.is_shard\("
    r"|_MaskPartial|partial_placement|is_tensor_partial",
    "private": r"schema_info|\._local_tensor\b|_sharding_prop|\.data_ptr\(",
}
"""What the assertions of a kind speak of: XLA chooses collectives and where results lie, and a
piece has no address of its own."""

_NAME = "__suite__"


def load(path: Path) -> ModuleType:
    """The module of a test file."""
    module = ModuleType(f"torch_tests_{path.stem}")
    module.__dict__.update(__file__=str(path))
    sys.modules[module.__name__] = module  # dataclasses and pickles look there
    decided = DECIDED.get(path.stem, {})
    offered = {"named": names.named, "module_named": names.module_named, "noted": noted}
    module.__dict__[_NAME] = SimpleNamespace(**offered)
    tree = renamed(path.read_text(), str(path), decided)
    exec(compile(tree, str(path), "exec"), module.__dict__)
    if path.stem in OWN_TENSORS:
        module.__dict__["parallelize_module"] = rank_zero.parallelize_module
    return module


def renamed(source: str, path: str, decided: Mapping[int, str] | None = None) -> ast.Module:
    """The syntax tree of a test file with its imports renamed.

    Args:
        source: of the file.
        path: of the file, for tracebacks.
        decided: see `differences.DECIDED`, of this file.
    """
    return ast.fix_missing_locations(_Renamer(decided or {}).visit(ast.parse(source, path)))


class _Renamer(ast.NodeTransformer):
    def __init__(self, decided: Mapping[int, str]):
        self.decided = decided

    def visit(self, node: ast.AST) -> Any:
        new = super().visit(node)
        if isinstance(node, ast.stmt) and node.lineno in self.decided:
            return _around(new, "decided", self.decided[node.lineno])
        return new

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        module = node.module or ""
        if not names.is_renamed(module):
            return node
        return [
            _assigned(node, one.asname or one.name, "named", module, one.name) for one in node.names
        ]

    def visit_Import(self, node: ast.Import) -> Any:
        (one, *others) = node.names
        if others or not one.asname or not names.is_renamed(one.name):
            return node
        return _assigned(node, one.asname, "module_named", one.name)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """`torch.distributed` and its parts where they are written out."""
        text = ast.unparse(node)
        if not isinstance(node.ctx, ast.Load) or not text.startswith("torch.distributed"):
            return self.generic_visit(node)
        module, _, name = text.rpartition(".")
        call = f"{_NAME}.module_named({text!r})"
        if module != "torch":
            call = f"{_NAME}.named({module!r}, {name!r})"
        return ast.copy_location(ast.parse(call, mode="eval").body, node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        text = ast.unparse(node)
        return _noting(node, text) if text.startswith("self.assert") else node

    def visit_Assert(self, node: ast.Assert) -> Any:
        return _noting(node, ast.unparse(node))


def _assigned(node: ast.stmt, target: str, function: str, *words: str) -> ast.stmt:
    call = f"{target} = {_NAME}.{function}({', '.join(map(repr, words))})"
    return ast.copy_location(ast.parse(call).body[0], node)


def _noting(node: ast.stmt, text: str) -> ast.stmt:
    for kind, pattern in _KINDS.items():
        if re.search(pattern, text):
            return _around(node, kind)
    return node


def _around(node: ast.stmt, *words: str) -> ast.stmt:
    given = ", ".join(map(repr, words))
    (around,) = ast.parse(f"with {_NAME}.noted({given}): pass").body
    assert isinstance(around, ast.With)
    around.body = [node]
    return ast.copy_location(around, node)
