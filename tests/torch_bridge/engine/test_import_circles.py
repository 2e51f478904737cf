"""No module of the engine imports itself by way of others, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[3] / "torch_bridge" / "engine"


def imports(
    source: str, name: str, modules: Iterable[str], *, is_package: bool = False
) -> set[str]:
    """The modules of the engine that a source imports, wherever it does.

    Args:
        source: of a module.
        name: its dotted name below the engine.
        modules: the dotted names of all.
        is_package: whether it is an `__init__.py`.
    """
    known, found = set(modules), set()
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            around = package[: len(package) - node.level + 1]
            path = [*around, *(node.module or "").split(".")]
        else:
            path = (node.module or "").removeprefix("isoshard.torch_bridge.engine").split(".")
            if path == (node.module or "").split("."):
                continue
        base = ".".join(part for part in path if part)
        for alias in node.names:
            inner = f"{base}.{alias.name}".lstrip(".")
            found |= {inner if inner in known else base} & known
    return found - {name}


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules that reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack += graph[name]
        return seen

    return sorted(name for name in graph if name in reached(name))


def graph_of_the_engine() -> dict[str, set[str]]:
    paths = {path.relative_to(ENGINE).with_suffix(""): path for path in ENGINE.rglob("*.py")}
    names = {
        ".".join(part for part in relative.parts if part != "__init__"): path
        for relative, path in paths.items()
    }
    return {
        name: imports(path.read_text(), name, names, is_package=path.name == "__init__.py")
        for name, path in names.items()
    }


def test_the_engine_has_no_circle_of_imports():
    graph = graph_of_the_engine()
    assert len(graph) > 50
    assert "tape" in graph["program"] and "recorder" in graph["capture.recording"]
    assert circles(graph) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from . import b", {"b"}),
        ("from .b import x", {"b"}),
        ("def f():\n    from .b import x", {"b"}),
        ("from .c.d import x", {"c.d"}),
        ("from isoshard.torch_bridge.engine import b", {"b"}),
        ("from isoshard.torch_bridge.engine.c.d import x", {"c.d"}),
        ("from isoshard.core import b", set()),
    ],
)
def test_imports_are_found(source, found):
    assert imports(source, "a", ["a", "b", "c.d"]) == found


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
