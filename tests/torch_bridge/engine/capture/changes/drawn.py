"""Random programs: a tree of objects, a step that reads some of its leaves, edits of leaves.

A `Program` is drawn as data, and written as Python source, so that the step is code like any other:

```
def step(x):
    x = x * root.alpha["beta"][1].gamma
    x = torch.relu(x) if read_1(root.delta) else torch.tanh(x)
    return x
```
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

NAMES = ("alpha", "beta", "gamma", "delta", "kappa", "omega")
VALUES: dict[str, tuple[Any, ...]] = {
    "float": (0.5, 2.0, -1.5, 0.0, -0.0, 1.0),
    "int": (1, 2, -3, 0),
    "flag": (True, False),
    "word": ("sine", "cosine"),
    "optional": (None, 2.0, 0.5),
    "tensor": (0.25, 1.5, -2.0),
}
USES = {
    "float": "x * {}",
    "int": "x + {}",
    "flag": "torch.relu(x) if {} else torch.tanh(x)",
    "word": "torch.sin(x) if {} == 'sine' else torch.cos(x)",
    "optional": "x if {0} is None else x * {0}",
    "tensor": "x + {}",
}
HOLDERS = ("closure", "global", "default", "method")
WAYS = ("plain", "helper", "computed", "vars", "property", "alias")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A number, flag, string, None or tensor, as the place of its value in `VALUES`."""

    kind: str
    value: int


@dataclasses.dataclass(frozen=True)
class Node:
    """An object, module, dataclass, dict or list, and what it holds."""

    kind: str
    children: tuple[Leaf | Node, ...]


Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A tree, which leaves the step reads and in which way, and edits.

    Attributes:
        tree: the objects.
        holder: how the step comes to the tree.
        reads: paths of leaves, and one of `WAYS` for each.
        edits: paths of leaves, and their new values.
    """

    tree: Node
    holder: str
    reads: tuple[tuple[Path, str], ...]
    edits: tuple[tuple[Path, int], ...]


def leaves(node: Leaf | Node, path: Path = ()) -> list[tuple[Path, Leaf]]:
    """Every leaf with its path."""
    if isinstance(node, Leaf):
        return [(path, node)]
    found = [leaves(child, (*path, number)) for number, child in enumerate(node.children)]
    return list(itertools.chain(*found))


_LEAVES = st.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: st.builds(Leaf, st.just(kind), st.integers(0, len(VALUES[kind]) - 1))
)


def _nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Node]:
    kinds = st.sampled_from(("object", "module", "dataclass", "dict", "list"))
    held = st.lists(children, min_size=1, max_size=3).map(tuple)
    return st.builds(Node, kinds, held)


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """Programs of up to a dozen leaves."""
    grown = st.recursive(_LEAVES, _nodes, max_leaves=8)
    rest = draw(st.lists(grown, min_size=1, max_size=3))
    tree = Node("object", tuple(rest))
    found = leaves(tree)
    paths = st.sampled_from([path for path, _ in found])
    reads = draw(st.lists(st.tuples(paths, st.sampled_from(WAYS)), min_size=1, max_size=4))
    kinds = dict(found)
    edits = []
    for _ in range(draw(st.integers(1, 3))):
        near = st.sampled_from([path for path, _ in reads])
        path = draw(st.one_of(near, near, paths))
        edits.append((path, draw(st.integers(0, len(VALUES[kinds[path].kind]) - 1))))
    return Program(tree, draw(st.sampled_from(HOLDERS)), tuple(reads), tuple(edits))


# --- From data to objects and code ---------------------------------------------------------------


class Thing:
    """A plain object whose attributes can be had through properties as well."""

    def __init__(self, **held: Any):
        vars(self).update(held)


for _name in NAMES:
    setattr(Thing, f"the_{_name}", property(lambda self, _name=_name: getattr(self, _name)))


class Part(torch.nn.Module):
    """A module with attributes."""

    def __init__(self, **held: Any):
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


def built(node: Leaf | Node, device: str) -> Any:
    """The objects of a tree."""
    if isinstance(node, Leaf):
        return value_of(node.kind, node.value, device)
    children = [built(child, device) for child in node.children]
    if node.kind == "list":
        return children
    held = dict(zip(NAMES, children, strict=False))
    if node.kind == "dict":
        return held
    if node.kind == "dataclass":
        return dataclasses.make_dataclass("Record", list(held))(**held)
    return (Part if node.kind == "module" else Thing)(**held)


def value_of(kind: str, number: int, device: str) -> Any:
    """A value of a leaf."""
    value = VALUES[kind][number]
    return torch.full((4,), value, device=device) if kind == "tensor" else value


def edit(root: Any, tree: Node, path: Path, number: int, device: str) -> None:
    """Put another value into a leaf."""
    holder, node = root, tree
    for step in path[:-1]:
        holder, node = _child(holder, node, step), node.children[step]
        assert isinstance(node, Node)
    leaf = node.children[path[-1]]
    assert isinstance(leaf, Leaf)
    value = value_of(leaf.kind, number, device)
    if node.kind == "list":
        holder[path[-1]] = value
    elif node.kind == "dict":
        holder[NAMES[path[-1]]] = value
    else:
        setattr(holder, NAMES[path[-1]], value)


def _child(holder: Any, node: Node, step: int) -> Any:
    if node.kind == "list":
        return holder[step]
    return holder[NAMES[step]] if node.kind == "dict" else getattr(holder, NAMES[step])


def names_of(program: Program) -> set[str]:
    """What an error may name: whatever lies on the way to a leaf that is edited."""
    found = {"root"}
    for path, _ in program.edits:
        found |= {NAMES[step] for step in path}
    return found


def source(program: Program) -> str:
    """The step as Python code."""
    helpers, body = [], []
    start = "self.root" if program.holder == "method" else "root"
    for number, (path, way) in enumerate(program.reads):
        expression, node = start, program.tree
        for step in path[:-1]:
            expression += _access(node, step)
            node = node.children[step]  # pyright: ignore[reportAssignmentType]
        leaf = node.children[path[-1]]
        assert isinstance(leaf, Leaf)
        if way == "helper":
            helpers.append(f"def read_{number}(one):\n    return one{_access(node, path[-1])}\n")
            expression = f"read_{number}({expression})"
        elif way == "alias":
            body.append(f"one = {expression}")
            expression = f"one{_access(node, path[-1])}"
        else:
            expression = _by(way, expression, node, path[-1])
        body.append(f"x = {USES[leaf.kind].format(expression)}")
    given = {"default": "x, root=root", "method": "self, x"}.get(program.holder, "x")
    lines = [f"def step({given}):", *(f"    {line}" for line in body), "    return x"]
    code = "\n".join(lines)
    if program.holder == "closure":
        indented = "\n".join(f"    {line}" for line in lines)
        code = f"def make(root):\n{indented}\n    return step\nstep = make(root)\ndel root"
    return "\n".join([*helpers, code, ""])


def _access(node: Node, step: int) -> str:
    if node.kind == "list":
        return f"[{step}]"
    return f"[{NAMES[step]!r}]" if node.kind == "dict" else f".{NAMES[step]}"


def _by(way: str, expression: str, node: Node, step: int) -> str:
    name = NAMES[step]
    attributes = node.kind in ("object", "module", "dataclass")
    if way == "computed" and attributes:
        return f"getattr({expression}, {name[:2]!r} + {name[2:]!r})"
    if way == "computed" and node.kind == "dict":
        return f"{expression}[''.join(({name[:2]!r}, {name[2:]!r}))]"
    if way == "vars" and attributes:
        return f"vars({expression})[{name!r}]"
    if way == "property" and node.kind == "object":
        return f"{expression}.the_{name}"
    return f"{expression}{_access(node, step)}"


_NUMBERS = itertools.count()


def stepped(program: Program, device: str) -> tuple[Callable[..., Any], Any]:
    """The step and the tree that it reads."""
    text, name = source(program), f"<drawn program {next(_NUMBERS)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    root = built(program.tree, device)
    module = types.ModuleType("drawn_program")
    vars(module).update(torch=torch, root=root)
    exec(compile(text, name, "exec"), vars(module))
    step = vars(module)["step"]
    if program.holder == "method":
        step = types.MethodType(step, Thing(root=root))
    return step, root
