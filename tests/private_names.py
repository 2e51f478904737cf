"""Search of a source for private names of other packages, by its syntax tree.

A private name is one with a leading underscore, or one that is not in the package's documentation:
all of a module that torch's or JAX's reference does not have (`DOCUMENTED`), and what a table of
private names has. It is found where

- a module is imported that has one in its path, or from which one is imported;
- an attribute of a module of another package is taken, however the module is called there;
- an attribute of anything else is taken that none of our classes and modules has, or that a table
  of private names has, also by `getattr` and its kin.

Operators (`torch.ops.aten._to_copy`) are looked up by name and are none.
"""

import ast
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator

FOREIGN = (
    *("torch", "jax", "jaxlib", "torch_xla", "numpy", "ml_dtypes", "flax", "optax", "orbax"),
    *("equinox", "onnx", "onnxscript", "google", "tensorstore", "safetensors", "fsspec"),
    *("transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("rich", "matplotlib"),
)
_MODULES = {
    "jax": """
        ad_checkpoint debug distributed dlpack dtypes errors export ffi flatten_util image lax
        lax.linalg nn nn.initializers numpy numpy.fft numpy.linalg ops profiler random ref scipy
        scipy.cluster
        scipy.fft scipy.integrate scipy.interpolate scipy.linalg scipy.ndimage scipy.optimize
        scipy.signal scipy.sparse scipy.spatial scipy.special scipy.stats sharding stages test_util
        tree tree_util typing
    """,
    "torch": """
        accelerator amp autograd autograd.forward_ad autograd.function autograd.graph backends
        backends.cuda backends.mps compiler cpu cuda distributed distributed.checkpoint
        distributed.checkpoint.filesystem distributed.checkpoint.metadata
        distributed.checkpoint.planner distributed.checkpoint.planner_helpers
        distributed.checkpoint.stateful distributed.device_mesh distributed.fsdp
        distributed.tensor distributed.tensor.parallel distributed.tensor.placement_types export
        fft func futures fx library linalg nested nn nn.functional nn.init nn.modules.module
        nn.parameter nn.utils nn.utils.parametrize nn.utils.rnn onnx onnx.errors ops optim
        optim.lr_scheduler optim.optimizer overrides profiler random serialization special
        utils utils.checkpoint utils.deterministic utils.dlpack utils.tensorboard
    """,
}
DOCUMENTED = {
    package: {package, *(f"{package}.{name}" for name in names.split())}
    for package, names in _MODULES.items()
}
"""The modules that the API reference of a package has a page or a section of. Of JAX `experimental`
and `extend` have pages, which promise nothing (https://docs.jax.dev/en/latest/api_compatibility.html).
"""
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller")
_DOTTED = re.compile(rf"(?:{'|'.join(FOREIGN)})(?:\.\w+)*\._[a-zA-Z]\w*(?:\.\w+)*")


def is_private(name: str) -> bool:
    """Whether a name has a leading underscore, and is none of Python's own."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@functools.cache
def is_undocumented(path: str) -> bool:
    """Whether a dotted name is, or is in, a module that its package's reference does not have."""
    package, *names = path.split(".")
    if package not in DOCUMENTED:
        return package == "jaxlib"
    module = package
    for name in names:
        module = f"{module}.{name}"
        if not is_module(module):
            return False
        if module not in DOCUMENTED[package] and not _leads_to_documented(module):
            return True
    return False


def _leads_to_documented(module: str) -> bool:
    return any(known.startswith(f"{module}.") for known in DOCUMENTED[module.partition(".")[0]])


def is_module(path: str) -> bool:
    """Whether a dotted name is that of a module that is installed."""
    try:
        return importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):  # of a parent, or of what is not made from a file
        return path in ("torch.ops", "torch.classes")


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is made of, without its leaves (`Load`, `Add`): half of all, and of no name."""
    for field in node._fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and child._fields:
                yield child


def _walked(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, but for leaves."""
    nodes = [tree]
    for node in nodes:
        nodes.extend(_children(node))
    return nodes


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """The private names that modules, classes and `self` are given in these sources."""
    found = set()
    for tree in trees:
        for node in _walked(tree):
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
        tables: the last parts of the names in the tables: theirs, whoever has them.
        paths: these names in full.
    """

    ours: set[str]
    tables: set[str]
    paths: set[str] = dataclasses.field(default_factory=set)

    def found(self, tree: ast.Module) -> list[tuple[int, str]]:
        """Every private name of others in a source: its line, and how it is written."""
        nodes = _walked(tree)
        modules = dict(_modules(nodes))
        foreign = _foreign_classes(tree, modules)
        paths = {*_imported(nodes), *_attributes(nodes, modules)}
        return sorted(
            {
                *((line, path) for line, path in paths if self._is_private_path(path)),
                *self._taken(nodes, modules, foreign),
                *_written(nodes),
            }
        )

    def _is_private_path(self, path: str) -> bool:
        if path.partition(".")[0] not in FOREIGN or path.startswith("torch.ops."):
            return False
        if any(map(is_private, path.split("."))) or is_undocumented(path):
            return True
        parts = path.split(".")
        return any(".".join(parts[:end]) in self.paths for end in range(2, len(parts) + 1))

    def _taken(
        self, nodes: list[ast.AST], modules: dict[str, str], foreign: dict[ast.AST, bool]
    ) -> Iterator[tuple[int, str]]:
        for node in nodes:
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                path = _path(node, modules)
                if path and path.partition(".")[0] != "isoshard":
                    continue  # of a module: see `_attributes`; or of a standard one
                if self._is_theirs(node.attr, _is_self(node.value) and not foreign.get(node)):
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


def _modules(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """What names of a source stand for that were imported."""
    for node in nodes:
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


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """The names that a source imports."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _attributes(nodes: list[ast.AST], modules: dict[str, str]) -> Iterator[tuple[int, str]]:
    """The attributes that are taken of what a source imports, by their paths."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and (path := _path(node, modules)):
            yield node.lineno, path


def _foreign_classes(tree: ast.Module, modules: dict[str, str]) -> dict[ast.AST, bool]:
    """For each node, whether `self` there is an object of a class derived from one of others."""
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
        for child in _children(node):
            found[child] = foreign
            walk(child, foreign)

    walk(tree, False)
    return found


def _written(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Dotted paths in strings; sentences are none."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _DOTTED.fullmatch(node.value):
                yield node.lineno, node.value
