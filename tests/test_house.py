"""The house: one name for one thing, rooms with arrows one way, imports where a reader looks."""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from isoshard.core.installation import ANNEXES, HEART
from tests import dialect
from tests.sources import parsed

ROOT = Path(__file__).resolve().parents[1]
HOUSES = HEART + ANNEXES
OPEN = ("benchmarks", "docs", "examples", "tools")
"""Folders whose names follow the same words, and nothing else of this page."""
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
        "generation",
        *("dtensor", "state", "recompute", "framework", "weights", "interop", "distributed"),
        *("kernels", "device", "dynamo", "checkpoints", "registration", "serving", "kit"),
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


def module_names(modules: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Short name -> modules; a package has its folder's, and a file of that name is part of it."""
    names = collections.defaultdict(list)
    for name, path in modules:
        if path.name == "__init__.py":
            names[path.parent.name].append(name)
        elif path.stem != path.parent.name:
            names[path.stem].append(name)
    return names


def class_names(sources: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Name of a class -> modules that define it."""
    names = collections.defaultdict(list)
    for name, tree in sources:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names[node.name].append(name)
    return names


def against_order(prefix: str, rooms: Sequence[str], edges: Mapping[str, set[str]]) -> list[str]:
    """Imports of a folder that go from a room to one behind it."""
    room_of = lambda name: rooms.index(name.removeprefix(prefix).split(".")[0])  # noqa: E731
    return [
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in sorted(others)
        if name.startswith(prefix) and other.startswith(prefix) and room_of(other) > room_of(name)
    ]


@pytest.mark.parametrize("house", HOUSES)
def test_a_module_name_stands_for_one_thing(house):
    again = twice(module_names(_ours(house)))
    assert {name: again[name] for name in again if name not in TWICE} == {}


@pytest.mark.parametrize("house", HOUSES)
def test_a_class_name_stands_for_one_thing(house):
    assert twice(class_names((name, trees()[name]) for name, _ in _ours(house))) == {}


def test_names_of_two_modules_and_of_two_classes_are_found():
    paths = ("a/spec.py", "b/spec.py", "b/b.py", "b/__init__.py", "c/b/__init__.py")
    modules = [(path, Path(path)) for path in paths]
    assert twice(module_names(modules)) == {
        "spec": ["a/spec.py", "b/spec.py"],
        "b": ["b/__init__.py", "c/b/__init__.py"],
    }
    source = ast.parse("class Spec: ...\ndef f():\n    class Inner: ...")
    assert twice(class_names([("a", source), ("b", source)])) == {"Spec": ["a", "b"]}


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
    edges = {name: graph()[name] | late()[name] for name in graph()}
    assert against_order(prefix, rooms, edges) == []


def test_an_import_against_the_order_is_found():
    edges = {"core.layout.mesh": {"core.plan.plan"}, "core.plan.plan": {"core.layout.spec", "jax"}}
    assert against_order("core.", ("layout", "plan"), edges) == [
        "core.layout.mesh imports core.plan.plan"
    ]
    assert against_order("core.", ("plan", "layout"), edges) == [
        "core.plan.plan imports core.layout.spec"
    ]


def kit_errors(listed: Sequence[str], used: set[str]) -> list[str]:
    """Names that a kit lists twice, that no annex uses, and that it does not list."""
    again = [f"{name} is listed twice" for name, n in collections.Counter(listed).items() if n > 1]
    unused = [f"no annex uses {name}" for name in sorted({*listed} - used)]
    return again + unused + [f"{name} is not listed" for name in sorted(used - {*listed})]


def test_names_that_a_kit_lacks_or_has_for_nothing_are_found():
    assert kit_errors(["Plan", "Plan", "Mesh"], {"Plan", "P"}) == [
        "Plan is listed twice",
        "no annex uses Mesh",
        "P is not listed",
    ]


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
    assert kit_errors(listed, used) == []
    module = importlib.import_module(kit)
    assert [name for name in listed if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match=f"module '{kit}' has no attribute 'nothing'"):
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


def untyped(body: Sequence[ast.stmt], *, any_needs_reason: bool) -> list[str]:
    """Parameters without a type, and those that are plain `Any`."""
    return [
        f"{function}({parameter}): {'no type' if type_ is None else 'why, in argument_types'}"
        for function, parameter, type_ in parameters(body)
        if type_ is None or (any_needs_reason and type_ == "Any")
    ]


def test_parameters_have_types_and_any_has_a_reason():
    wrong = []
    for name, path in _ours("torch_bridge"):
        room = path.relative_to(ROOT / "torch_bridge").parts[0]
        errors = untyped(trees()[name].body, any_needs_reason=room in ANSWERED)
        wrong += [f"{name}: {error}" for error in errors]
    assert wrong == []


def test_parameters_without_a_type_or_a_reason_are_found():
    body = ast.parse("def f(a, b: Any, c: int): ...").body
    assert untyped(body, any_needs_reason=False) == ["f(a): no type"]
    assert untyped(body, any_needs_reason=True) == ["f(a): no type", "f(b): why, in argument_types"]


def test_parameters_are_found():
    source = "def f(a, *, b: Any = 1, **c: Any): ..\nclass A:\n    def f(self, x: int): .."
    source += "\n    def _g(self, y): ..\nclass _B:\n    def f(self, z): .."
    found = list(parameters(ast.parse(source.replace("..", "...")).body))
    assert found == [("f", "a", None), ("f", "b", "Any"), ("A.f", "x", "int")]


def without_reason(body: Sequence[ast.stmt]) -> list[str]:
    """Aliases that no docstring follows."""
    return [
        ast.unparse(node.target)
        for node, next_ in zip(body, [*body[1:], ast.Pass()], strict=True)
        if isinstance(node, ast.AnnAssign)
        and not (isinstance(next_, ast.Expr) and isinstance(next_.value, ast.Constant))
    ]


def test_every_alias_of_any_has_a_reason():
    body = trees()["isoshard.torch_bridge.common.argument_types"].body
    assert sum(isinstance(node, ast.AnnAssign) for node in body) > 10
    assert without_reason(body) == []


def test_an_alias_without_a_reason_is_found():
    source = "A: TypeAlias = Any\nB: TypeAlias = Any\n'why'\nC: TypeAlias = Any"
    assert without_reason(ast.parse(source).body) == ["A", "C"]


def _not_said() -> dict[str, str]:
    """Words that the glossary replaces -> the word to use."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|.*\| (.*?) \|$", GLOSSARY.read_text(), re.MULTILINE)
    return {word: term for term, words in rows for word in re.findall(r"`(\w+)`", words)}


@pytest.mark.parametrize("house", HOUSES)
def test_names_are_of_the_glossary(house):
    wrong = []
    for name, path in _ours(house):
        names = [path.stem, *(n.name for n in trees()[name].body if isinstance(n, ast.ClassDef))]
        wrong += [f"{name}: {error}" for error in not_of_the_glossary(names)]
    assert wrong == []


def not_of_the_glossary(names: Iterable[str]) -> list[str]:
    """Names of modules and classes with a word that the glossary replaces."""
    instead = _not_said()
    return [
        f"{name}: say {instead[word]}"
        for name in names
        for word in dialect.split(name)
        if word in instead
    ]


def test_names_that_are_not_of_the_glossary_are_found():
    assert not_of_the_glossary(["shard_list", "HeldPieces"]) == [
        "HeldPieces: say shard",
        "HeldPieces: say shard",
    ]


KEPT = {
    "core/blocks/block_layout.py": {"alike"},
    "core/layout/sharding_groups.py": {"shard_alike"},
    "onnx_bridge/executor/operators/registry.py": {"known"},
    "onnx_bridge/exporting/torch_export.py": {"twin"},
    "planner/reports/comparison.py": {"whole"},
    "torch_bridge/checkpoints/torch_files.py": {"tell"},
}
"""Names of public functions and their parameters, JAX's `shard_alike`, Python's `tell`."""


def test_identifiers_have_the_fields_words():
    wrong = [
        f"{file}: {word}"
        for house in HOUSES
        for name, path in _ours(house)
        for file in [path.relative_to(ROOT).as_posix()]
        for word in dialect.in_identifiers(trees()[name])
        if word.partition(": ")[2] not in KEPT.get(file, ())
    ]
    assert wrong == [], "use JAX's and PyTorch's words: docs/glossary.md"


def test_identifiers_beside_the_houses_have_the_fields_words():
    paths = [path for folder in OPEN for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 150
    with parsed(paths) as sources:
        wrong = [
            f"{path.relative_to(ROOT)}: {name}"
            for path, tree in sources.items()
            for name in dialect.in_identifiers(tree)
        ]
    assert wrong == []


def test_messages_have_the_fields_words():
    wrong = [
        f"{name}: {one}"
        for house in HOUSES
        for name, _ in _ours(house)
        for one in dialect.in_messages(trees()[name])
    ]
    assert wrong == []


def test_pages_have_the_fields_words():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    wrong = [phrase for page in pages for phrase in dialect.in_page(page)]
    # the glossary lists words that are not used
    assert [phrase for phrase in wrong if not phrase.startswith("glossary.md:")] == []


def test_words_are_found(tmp_path):
    source = "class Laid:\n    def told(self, one):\n        self.held = found = one"
    found = dialect.in_identifiers(ast.parse(source))
    assert [one.partition(": ")[2] for one in found] == ["Laid", "told", "one", "held", "found"]
    raised = "raise ValueError(f'{x} lies on no mesh; lay it out')"
    assert [one.partition(": ")[2] for one in dialect.in_messages(ast.parse(raised))] == [
        "lies on",
        "lay it out",
    ]
    warned = "warnings.warn(f'{x} is laid out', stacklevel=2)"
    assert dialect.in_messages(ast.parse(warned)) == ["line 1: laid out"]
    page = tmp_path / "page.md"
    page.write_text("# A page\nIt is sharded.\nNobody says no here.\n")
    assert dialect.in_page(page) == ["page.md:3: says no"]


ARCHITECTURE = ROOT / "docs" / "architecture.md"


def table_below(page: str, header: str) -> str:
    """The rows of a page's table."""
    return page.partition(header)[2].partition("\n\n")[0]


def not_there(text: str, *roots: Path) -> list[str]:
    """Of the files in a text, and of the names in them (`core/errors.py:SpecError`), the wrong."""
    wrong = []
    for path, name in re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", text):
        file = next((root / path for root in roots if (root / path).is_file()), None)
        if file is None or (name and name not in defined(ast.parse(file.read_text()).body)):
            wrong.append(f"{path}:{name}" if name else path)
    return wrong


def defined(body: Sequence[ast.stmt], inside: str = "") -> Iterator[str]:
    """The functions, classes, methods (`Guard.check`) and constants of a module."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{inside}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{inside}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                f"{inside}{target.id}" for target in targets if isinstance(target, ast.Name)
            )


@pytest.mark.parametrize("header", ["| question | answer |", "| where is it decided | answer |"])
def test_the_answers_of_the_page_are_there(header):
    table = table_below(ARCHITECTURE.read_text(), header)
    assert table.count("\n|") - 1 >= 10
    assert len(re.findall(r"`[\w/]+\.py", table)) >= 10
    assert not_there(table, ROOT, ROOT / "torch_bridge") == []


@pytest.mark.parametrize("name", ["data_model", "engine", "debugging_recompilations", "adding"])
def test_the_files_of_a_page_are_there(name):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    folders = ("torch_bridge", "torch_bridge/engine", "planner", "planner/propagation")
    roots = (ROOT, *(ROOT / folder for folder in folders))
    paths = [path for path in re.findall(r"`([\w/]+\.py)`", page) if "/" in path]
    assert paths
    assert not_there("\n".join(f"`{path}`" for path in paths), *roots) == []


def test_reasons_of_recompilations_are_those_of_the_source():
    page = (ROOT / "docs" / "debugging_recompilations.md").read_text()
    rows = table_below(page, "| reason | usual cause | what to do |").splitlines()
    source = (ROOT / "torch_bridge/engine/compiling/recompile_reasons.py").read_text()
    reasons = [one for row in rows[2:] for one in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    texts = re.findall(r'(?:return|or) f?"([^"{]+)', source)
    assert len(reasons) > 8
    assert [one for one in reasons if not any(text.startswith(one) for text in texts)] == []
    changed = "a place that changed"  # of `_cause` before it compares
    covered = lambda text: text.startswith((*reasons, changed))  # noqa: E731
    assert [text for text in texts if not covered(text)] == []


def test_the_planners_rules_are_there():
    page = (ROOT / "docs" / "planning.md").read_text()
    section = page.partition("## The rules and what they imitate")[2].partition("\n## ")[0]
    files = re.findall(r"^\| [^|]+ \| (`[\w/]+\.py`) \|", section, re.MULTILINE)
    assert len(files) > 30
    assert not_there("\n".join(files), ROOT / "planner") == []


def test_a_wrong_answer_is_found():
    right = "`core/errors.py`, `core/errors.py:SpecError`, `tests/dialect.py:WORDS`"
    right += "`torch_bridge/engine/capture/guards.py:Guard.check`"
    assert not_there(right, ROOT) == []
    wrong = "`core/no_such.py`, `core/errors.py:NoSuchError`, `core/errors.py:SpecError.no_such`"
    assert not_there(right + wrong, ROOT) == [
        "core/no_such.py",
        "core/errors.py:NoSuchError",
        "core/errors.py:SpecError.no_such",
    ]
    page = "| a | b |\n|---|---|\n| `core/no_such.py` | |\n\n`core/no_such_either.py`"
    assert not_there(table_below(page, "| a | b |"), ROOT) == ["core/no_such.py"]


def picture_errors(picture: str, edges: Mapping[str, set[str]]) -> list[str]:
    """What a picture of the folders lacks, and arrows and boxes that are not in the source.

    Args:
        picture: SVG; a box has the folder's name as text of class `t`, an arrow the two as its id.
        edges: folder -> the folders that it imports.
    """
    boxes = set(re.findall(r'class="t">(\w+)<', picture))
    arrows = set(re.findall(r'id="(\w+-\w+)"', picture))
    imported = {f"{folder}-{other}" for folder, others in edges.items() for other in others}
    return [
        *[f"no box for {folder}" for folder in sorted({*edges} - boxes)],
        *[f"no folder {folder}" for folder in sorted(boxes - {*edges})],
        *[f"no arrow {arrow}" for arrow in sorted(imported - arrows)],
        *[f"no import {arrow}" for arrow in sorted(arrows - imported)],
    ]


def test_the_picture_is_of_this_house():
    edges: dict[str, set[str]] = {house: set() for house in HOUSES}
    for name, others in graph().items():
        folder = name.split(".")[1]
        edges[folder] |= {other.split(".")[1] for other in others} - {folder}
    picture = (ROOT / "docs" / "house.svg").read_text()
    assert picture_errors(picture.replace("isoshard (src/isoshard)", ""), edges) == []


def test_errors_of_a_picture_are_found():
    picture = '<text class="t">core</text> <text class="t">gone</text> <path id="core-gone"/>'
    assert picture_errors(picture, {"core": set(), "planner": {"core"}}) == [
        "no box for planner",
        "no folder gone",
        "no arrow planner-core",
        "no import core-gone",
    ]


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
