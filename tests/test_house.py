"""The house: one name for one thing, rooms with arrows one way, imports where a reader looks."""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from isoshard.core.installation import ANNEXES, HEART
from tests import dialect
from tests.sources import parsed

ROOT = Path(__file__).resolve().parents[1]
HOUSES = HEART + ANNEXES
OF_OTHERS = ("torch_xla_bridge/torch_xla/",)
"""Trees whose names are somebody else's."""
TWICE = {
    "loss": "torch.distributed.tensor.parallel has a module of this name, too",
    "tensor": "torch.distributed has a module of this name, too",
}
"""Module names that stand for two things in one house, with the reason."""

ROOMS = {
    "core": (
        *("installation", "errors", "deprecations", "extensions", "lazy_names"),
        *("runtime", "frameworks"),
        *("layout", "plan", "processes", "transfer", "pictures", "nn", "blocks", "lifting"),
        *("weights", "checkpoint", "data", "repeats", "traced", "kit"),
    ),
    "torch_bridge": (
        *("common", "_torch_internals", "placements", "lowerings", "engine", "execution"),
        *("layout", "overrides", "tensors", "spmd", "loops", "trainers", "handlers", "modules"),
        *("dtensor", "state", "recompute", "framework", "weights", "interop", "distributed"),
        *("kernels", "device", "dynamo", "checkpoints", "registration", "kit"),
    ),
    "torch_bridge/engine": (
        *("values", "recording", "signatures", "compiling", "operators", "subprograms", "capture"),
    ),
    "planner": (
        *("machine", "traced", "reports", "costs", "scheduling", "propagation", "programs"),
        *("plan_search", "output_marks", "torch_steps", "flax_steps", "estimating", "cli"),
    ),
    "domain": (
        *("windows", "fourier", "attention", "points", "handlers", "torch_handlers"),
        "torch_verbs",
    ),
    "onnx_bridge": (
        *("errors", "layouts", "reading", "checking", "annotating", "executor", "exporting"),
        *("planning", "models", "cli"),
    ),
    "torch_xla_bridge": (
        *("session", "export", "loading", "torch_xla_backend", "xla_alias", "torch_xla"),
        *("drop_in", "cli"),
    ),
}
"""Folder -> its rooms: each imports from those before it, and from no other."""

INSIDE = {
    "isoshard.torch_bridge.distributed.parallel_hook": "needs torch.distributed.tensor, optional",
    "isoshard.torch_bridge.distributed.torch_hook": "needs torch.distributed.tensor, optional",
    "isoshard.torch_bridge.registration": "torch.distributed.checkpoint takes 2 s to import",
    "isoshard.onnx_bridge.cli.onnx": "drawing needs rich's tables, checking does not",
    "isoshard.torch_xla_bridge.torch_xla._internal.tpu": "torch_xla imports it when named",
    "isoshard.torch_xla_bridge.torch_xla.distributed.xla_backend": "likewise",
    "isoshard.torch_xla_bridge.torch_xla.torch_xla": "likewise",
}
"""Modules that import others of their house inside functions, with the reason."""

GLOSSARY = ROOT / "docs" / "glossary.md"


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("isoshard", *(part for part in parts if part != "__init__")))


FILES = {_module(path): path for house in HOUSES for path in sorted((ROOT / house).rglob("*.py"))}


def _ours(house: str, *, others: bool = False) -> Iterator[tuple[str, Path]]:
    for name, path in FILES.items():
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(f"{house}/") and (others or not relative.startswith(OF_OTHERS)):
            yield name, path


def _names(body: Sequence[ast.stmt], *, inside: bool) -> Iterator[ast.ImportFrom]:
    """The `from .. import ..` of a body: those of the module, or those inside functions."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and not inside:
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if inside:
                yield from (one for one in ast.walk(node) if isinstance(one, ast.ImportFrom))
        elif isinstance(node, ast.ClassDef | ast.With | ast.Try):
            yield from _names(node.body, inside=inside)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _names([*node.body, *node.orelse], inside=inside)


def imports(name: str, tree: ast.Module, known: Mapping[str, Path], *, inside: bool) -> set[str]:
    """The modules of the houses that a module imports.

    Args:
        name: of the module.
        tree: its source.
        known: all modules, by name.
        inside: those inside functions, instead of those of the module.
    """
    package = name.split(".")
    package = package if known[name].name == "__init__.py" else package[:-1]
    found = set()
    for node in _names(tree.body, inside=inside):
        base = package[: len(package) - node.level + 1] if node.level else []
        stem = ".".join([*base, *filter(None, [node.module])])
        for alias in node.names:
            full = f"{stem}.{alias.name}"
            found |= {full if full in known else stem} & set(known)
    return found - {name}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The source of each module."""
    return {name: _READ[path] for name, path in FILES.items()}


_READ: dict[Path, ast.Module] = {}


@pytest.fixture(scope="module", autouse=True)
def _read() -> Iterator[None]:
    """Read the sources once, and forget them behind these tests."""
    with parsed(FILES.values()) as found:
        _READ.update(found)
        yield
        _READ.clear()
        trees.cache_clear()


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each module imports."""
    return {name: imports(name, tree, FILES, inside=False) for name, tree in trees().items()}


@functools.cache
def late() -> dict[str, set[str]]:
    """What each module imports inside functions alone."""
    return {
        name: imports(name, tree, FILES, inside=True) - graph()[name]
        for name, tree in trees().items()
    }


def circles(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules that reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        stack = list(edges[start])
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack += edges[name]
        return seen

    return sorted(name for name in edges if name in reached(name))


def twice(found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """What has more than one place."""
    return {name: places for name, places in found.items() if len(places) > 1}


@pytest.mark.parametrize("house", HOUSES)
def test_a_module_name_stands_for_one_thing(house):
    found = collections.defaultdict(list)
    for name, path in _ours(house):
        if path.name != "__init__.py" and path.stem != path.parent.name:
            found[path.stem].append(name)
        elif path.name == "__init__.py":
            found[path.parent.name].append(name)
    again = twice(found)
    assert {name: again[name] for name in again if name not in TWICE} == {}


@pytest.mark.parametrize("house", HOUSES)
def test_a_class_name_stands_for_one_thing(house):
    found = collections.defaultdict(list)
    for name, _ in _ours(house):
        for node in trees()[name].body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    assert twice(found) == {}


def test_exceptions_are_needed():
    paths = [path for house in HOUSES for _, path in _ours(house)]
    found = collections.Counter(p.parent.name if p.stem == "__init__" else p.stem for p in paths)
    assert [name for name in TWICE if found[name] < 2] == []
    assert [name for name in INSIDE if not late().get(name)] == []


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_one_way(folder):
    rooms = ROOMS[folder]
    prefix = f"isoshard.{folder.replace('/', '.')}."
    there = {path.name.removesuffix(".py") for path in (ROOT / folder).iterdir()} - {"__pycache__"}
    assert there - {"__init__", "README.md", "kit.pyi"} == set(rooms)
    wrong = []
    for name in graph():
        for other in graph()[name] | late()[name]:
            if name.startswith(prefix) and other.startswith(prefix):
                here, above = (one.removeprefix(prefix).split(".")[0] for one in (name, other))
                if rooms.index(above) > rooms.index(here):
                    wrong.append(f"{name} imports {other}")
    assert wrong == []


@pytest.mark.parametrize("house", HEART)
def test_a_kit_lists_what_annexes_use(house):
    stub = ast.parse((ROOT / house / "kit.pyi").read_text())
    listed = [alias.asname for node in stub.body[1:] for alias in node.names]
    kit = f"isoshard.{house}.kit"
    used = {
        alias.name
        for annex in ANNEXES
        for name, _ in _ours(annex, others=True)
        for node in ast.walk(trees()[name])
        if isinstance(node, ast.ImportFrom) and node.module == kit
        for alias in node.names
    }
    assert sorted(listed) == sorted({*listed}), "a name is listed twice"
    assert {*listed} == used
    module = importlib.import_module(kit)
    assert [name for name in listed if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match=f"{kit} lists no 'nothing'"):
        module.nothing  # noqa: B018  (the reading is what raises)


def test_no_module_imports_itself_by_way_of_others():
    assert len(graph()) > 500
    assert circles(graph()) == []


@pytest.mark.parametrize("folder", ["torch_bridge/engine", "domain", "core/layout"])
def test_nor_inside_functions(folder):
    prefix = f"isoshard.{folder.replace('/', '.')}."
    edges = {
        name: {other for other in graph()[name] | late()[name] if other.startswith(prefix)}
        for name in graph()
        if name.startswith(prefix)
    }
    found = circles(edges)
    assert len(edges) > 10
    assert found == []


def test_imports_stand_at_the_top():
    found = {name: sorted(others) for name, others in late().items() if others}
    assert {name: found[name] for name in found if name not in INSIDE} == {}


ANSWERED = (
    *("spmd", "interop", "dtensor", "distributed", "handlers", "layout"),
    *("tensor.py", "generator.py", "runtime.py", "weights.py", "domain.py", "recompute.py"),
)
"""Of torch_bridge: where a parameter of a public function that is plain `Any` must say why."""


def parameters(body: Sequence[ast.stmt], inside: str = "") -> Iterator[tuple[str, str, str | None]]:
    """The parameters of public functions and methods: function, name, annotation.

    What is passed on (`*args`, `**kwargs`), and what a method belongs to, are none.
    """
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from parameters(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and node.name not in ("__init__", "__new__", "__call__"):
                continue
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            own = every[:1] if inside and every and every[0].arg in ("self", "cls") else []
            for one in every[len(own) :]:
                said = None if one.annotation is None else ast.unparse(one.annotation)
                yield f"{inside}{node.name}", one.arg, said


def test_parameters_have_types_and_any_has_a_reason():
    plain = []
    for name, path in _ours("torch_bridge"):
        room = path.relative_to(ROOT / "torch_bridge").parts[0]
        for function, parameter, said in parameters(trees()[name].body):
            assert said is not None, f"{name}: {function}({parameter})"
            if room in ANSWERED and said == "Any":
                plain.append(f"{name}: {function}({parameter}): say why in argument_types")
    assert plain == []


def test_parameters_are_found():
    source = "def f(a, *, b: Any = 1, **c: Any): ..\nclass A:\n    def f(self, x: int): .."
    source += "\n    def _g(self, y): ..\nclass _B:\n    def f(self, z): .."
    found = list(parameters(ast.parse(source.replace("..", "...")).body))
    assert found == [("f", "a", None), ("f", "b", "Any"), ("A.f", "x", "int")]


def test_every_alias_of_any_has_a_reason():
    body = trees()["isoshard.torch_bridge.common.argument_types"].body
    names = [node for node in body if isinstance(node, ast.AnnAssign)]
    assert len(names) > 10
    for node in names:
        reason = body[body.index(node) + 1]
        assert isinstance(reason, ast.Expr) and isinstance(reason.value, ast.Constant)


def _not_said() -> dict[str, str]:
    """Words that the glossary replaces -> the word to use."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|.*\| (.*?) \|$", GLOSSARY.read_text(), re.MULTILINE)
    return {word: term for term, words in rows for word in re.findall(r"`(\w+)`", words)}


@pytest.mark.parametrize("house", HOUSES)
def test_names_are_of_the_glossary(house):
    instead = _not_said()
    assert instead["piece"] == "shard"
    wrong = []
    for name, path in _ours(house):
        names = [path.stem, *(n.name for n in trees()[name].body if isinstance(n, ast.ClassDef))]
        for one in names:
            words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", one)
            said = [word for word in words if word.lower() in instead]
            wrong += [f"{name}: {one}: say {instead[word.lower()]}" for word in said]
    assert wrong == []


ROOMS_TO_RENAME: dict[str, int] = {
    "core/blocks": 2,
    "core/checkpoint": 69,
    "core/errors": 3,
    "core/frameworks": 2,
    "core/layout": 1,
    "core/lifting": 1,
    "core/pictures": 2,
    "core/processes": 30,
    "core/repeats": 55,
    "core/runtime": 8,
    "core/traced": 21,
    "core/weights": 106,
    "planner/cli": 8,
    "planner/costs": 2,
    "planner/estimating": 2,
    "planner/flax_steps": 1,
    "planner/machine": 11,
    "planner/plan_search": 124,
    "planner/programs": 76,
    "planner/propagation": 117,
    "planner/reports": 54,
    "planner/scheduling": 3,
    "planner/torch_steps": 31,
    "planner/traced": 8,
    "torch_bridge/__init__": 1,
    "torch_bridge/_torch_internals": 6,
    "torch_bridge/checkpoints": 13,
    "torch_bridge/common": 1,
    "torch_bridge/device": 10,
    "torch_bridge/distributed": 7,
    "torch_bridge/dtensor": 61,
    "torch_bridge/dynamo": 48,
    "torch_bridge/engine": 57,
    "torch_bridge/framework": 7,
    "torch_bridge/handlers": 5,
    "torch_bridge/interop": 244,
    "torch_bridge/layout": 51,
    "torch_bridge/loops": 45,
    "torch_bridge/lowerings": 15,
    "torch_bridge/modules": 3,
    "torch_bridge/overrides": 14,
    "torch_bridge/recompute": 6,
    "torch_bridge/registration": 1,
    "torch_bridge/spmd": 117,
    "torch_bridge/state": 10,
    "torch_bridge/tensors": 8,
    "torch_bridge/trainers": 8,
    "torch_bridge/weights": 6,
    "torch_xla_bridge/export": 1,
}
"""Room -> identifiers that still have a word of the dialect; no room gets a new one."""

KEPT = {
    "onnx_bridge/executor/operators/registry.py": {"known"},
    "onnx_bridge/exporting/torch_export.py": {"twin"},
    "torch_xla_bridge/session/syncfree.py": {"found_inf"},
}
"""Parameters of public functions, and what torch calls `found_inf`."""


def _dialect() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for house in HOUSES:
        for name, path in _ours(house):
            file = path.relative_to(ROOT)
            found.setdefault("/".join(file.with_suffix("").parts[:2]), []).extend(
                f"{file}: {word}"
                for word in dialect.in_identifiers(trees()[name])
                if word.partition(": ")[2] not in KEPT.get(file.as_posix(), ())
            )
    return found


def test_identifiers_have_the_fields_words():
    wrong = _dialect()
    new = {
        room: names for room, names in wrong.items() if len(names) > ROOMS_TO_RENAME.get(room, 0)
    }
    assert new == {}, "say it as JAX or PyTorch do: docs/glossary.md"
    fewer = {room: len(wrong.get(room, ())) for room in ROOMS_TO_RENAME}
    assert fewer == ROOMS_TO_RENAME, "lower the numbers of ROOMS_TO_RENAME"


MESSAGES_TO_WRITE = 33
"""Messages that still have a phrase of the dialect."""


def test_messages_have_the_fields_words():
    wrong = [
        f"{name}: {one}"
        for house in HOUSES
        for name, _ in _ours(house)
        for one in dialect.in_messages(trees()[name])
    ]
    assert len(wrong) <= MESSAGES_TO_WRITE, wrong
    assert len(wrong) == MESSAGES_TO_WRITE, "lower MESSAGES_TO_WRITE"


def test_pages_have_the_fields_words():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    wrong = [phrase for page in pages for phrase in dialect.in_page(page)]
    # the glossary lists words that are not used
    assert [phrase for phrase in wrong if not phrase.startswith("glossary.md:")] == []


def test_words_are_found():
    source = "class Laid:\n    def told(self, one):\n        self.held = found = one"
    found = dialect.in_identifiers(ast.parse(source))
    assert [one.partition(": ")[2] for one in found] == ["Laid", "told", "one", "held", "found"]
    raised = "raise ValueError(f'{x} lies on no mesh; lay it out')"
    assert [one.partition(": ")[2] for one in dialect.in_messages(ast.parse(raised))] == [
        "lies on",
        "lay it out",
    ]


def test_the_answers_of_the_page_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| question | answer |")[2].partition("\n\n")[0]
    paths = re.findall(r"`([\w/]+\.py)`", table)
    assert table.count("\n|") - 1 >= 10 and len(paths) >= 10
    roots = (ROOT, ROOT / "torch_bridge")
    assert [path for path in paths if not any((root / path).is_file() for root in roots)] == []


@pytest.mark.parametrize(
    ("source", "inside", "found"),
    [
        ("from . import b", False, {"isoshard.x.b"}),
        ("from .b import name", False, {"isoshard.x.b"}),
        ("def f():\n    from .b import name", False, set()),
        ("def f():\n    from .b import name", True, {"isoshard.x.b"}),
        ("class A:\n    def f(self):\n        from .b import name", True, {"isoshard.x.b"}),
        ("if TYPE_CHECKING:\n    from .b import name", False, set()),
        ("from isoshard.x import b", False, {"isoshard.x.b"}),
    ],
)
def test_imports_are_found(source, inside, found):
    known = {"isoshard.x.a": Path("a.py"), "isoshard.x.b": Path("b.py")}
    assert imports("isoshard.x.a", ast.parse(source), known, inside=inside) == found


def test_a_circle_and_a_second_place_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert twice({"a": ["x"], "b": ["x", "y"]}) == {"b": ["x", "y"]}
