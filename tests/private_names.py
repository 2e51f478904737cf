"""Search of a source for private names of torch and JAX, by its syntax tree.

A private name is one with a leading underscore. It is found where

- a module is imported that has one in its path, or from which one is imported;
- an attribute of a module of torch or JAX is taken, however the module is called there;
- an attribute of anything else is taken that none of our classes and modules has, or that a table
  of private names has, also by `getattr` and its kin.

Operators (`torch.ops.aten._to_copy`) are looked up by name and are none.
"""

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator

FOREIGN = ("torch", "jax", "jaxlib", "torch_xla")
UNDOCUMENTED = ("torch.utils.backend_registration", "torch.fx.experimental")
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller")
_DOTTED = re.compile(rf"(?:{'|'.join(FOREIGN)})(?:\.\w+)*\._[a-zA-Z]\w*(?:\.\w+)*")


def is_private(name: str) -> bool:
    """Whether a name has a leading underscore, and is none of Python's own."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """The private names that modules, classes and `self` are given in these sources."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.Module | ast.ClassDef):
                for statement in node.body:
                    found |= set(_targets(statement))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
    return {name for name in found if is_private(name)}


def _targets(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


@dataclasses.dataclass
class Search:
    """What is looked for in a source.

    Attributes:
        ours: private names that our own classes and modules have.
        tables: the last parts of torch's and JAX's names in the tables: theirs, whoever has them.
    """

    ours: set[str]
    tables: set[str]

    def found(self, tree: ast.Module) -> list[tuple[int, str]]:
        """Every private name of torch or JAX in a source: its line, and how it is written."""
        modules = dict(_modules(tree))
        foreign = _foreign_classes(tree, modules)
        return sorted({*_imported(tree), *self._taken(tree, modules, foreign), *_written(tree)})

    def _taken(
        self, tree: ast.Module, modules: dict[str, str], foreign: dict[ast.AST, bool]
    ) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                path = _path(node, modules)
                if path and path.startswith("torch.ops."):
                    continue
                if path and path.partition(".")[0] in FOREIGN:
                    yield node.lineno, path
                elif path and path.partition(".")[0] not in ("isoshard", ""):
                    continue  # a module of another package
                elif self._is_theirs(node.attr, _is_self(node.value) and not foreign.get(node)):
                    yield node.lineno, ast.unparse(node)
            elif isinstance(node, ast.Call) and _called(node) in _BY_NAME:
                for word in node.args[_called(node) not in ("attrgetter", "methodcaller") :]:
                    if isinstance(word, ast.Constant) and isinstance(word.value, str):
                        if is_private(word.value) and self._is_theirs(word.value, False):
                            yield node.lineno, ast.unparse(node)

    def _is_theirs(self, name: str, on_our_self: bool) -> bool:
        return name not in self.ours or (name in self.tables and not on_our_self)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _modules(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What names of a source stand for that were imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.partition(".")[0],
                    (alias.name if alias.asname else alias.name.partition(".")[0]),
                )
        elif isinstance(node, ast.ImportFrom):
            stem = "isoshard" if node.level else node.module or ""
            for alias in node.names:
                yield alias.asname or alias.name, f"{stem}.{alias.name}"


def _path(node: ast.AST, modules: dict[str, str]) -> str:
    """The dotted path of an attribute of something imported; empty if it is none."""
    if isinstance(node, ast.Attribute):
        owner = _path(node.value, modules)
        return owner and f"{owner}.{node.attr}"
    return modules.get(node.id, "") if isinstance(node, ast.Name) else ""


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] in FOREIGN and (
                any(map(is_private, name.split("."))) or name.startswith(UNDOCUMENTED)
            ):
                yield node.lineno, name


def _foreign_classes(tree: ast.Module, modules: dict[str, str]) -> dict[ast.AST, bool]:
    """For each node, whether `self` there is an object of a class derived from torch or JAX."""
    found: dict[ast.AST, bool] = {}

    def walk(node: ast.AST, foreign: bool) -> None:
        if isinstance(node, ast.ClassDef):
            roots = [_path(base, modules).partition(".")[0] for base in node.bases]
            foreign = any(root in FOREIGN for root in roots)
        elif isinstance(node, ast.FunctionDef) and not foreign and node.args.args[:1]:
            # `def wrapped(self: torch.nn.Module, ..)`, put into a class of theirs
            first = node.args.args[0]
            annotated = first.annotation is not None and first.arg == "self"
            foreign = annotated and not isinstance(first.annotation, ast.Constant)
        for child in ast.iter_child_nodes(node):
            found[child] = foreign
            walk(child, foreign)

    walk(tree, False)
    return found


def _written(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Dotted paths in strings; sentences are none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DOTTED.fullmatch(node.value):
                yield node.lineno, node.value
