"""Imports run one way: bridges and commands import core, core imports nothing above it."""

import ast
import dataclasses
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from isoshard.core.installation import ANNEXES, HEART
from tests.sources import parsed

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Room:
    """What the files of one folder may import, as top-level names, besides the standard library."""

    folder: str
    ours: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def package(self) -> str:
        return ".".join(("isoshard", *Path(self.folder.removeprefix("src/isoshard")).parts))


EVERYONE = ("jax", "numpy", "rich")
_HEART = tuple(f"isoshard.{name}" for name in HEART)
_KITS = tuple(f"{name}.kit" for name in _HEART)
COMMANDS = (*_KITS, "isoshard.cli", "isoshard")
ROOMS = [
    Room("core", (), (*EVERYONE, "tensorstore", "orbax")),  # these two by `core/checkpoint` alone
    Room("jax_bridge", ("isoshard.core",), (*EVERYONE, "flax", "optax")),
    Room("torch_bridge", ("isoshard.core",), (*EVERYONE, "torch", "fsspec", "transformers")),
    Room("planner/cli", ("isoshard.planner", *COMMANDS), (*EVERYONE, "torch", "transformers")),
    Room("planner", _KITS, (*EVERYONE, "torch", "flax", "optax", "libtpu")),
    Room("domain", _KITS, (*EVERYONE, "torch")),
    Room("onnx_bridge/cli", ("isoshard.onnx_bridge", *COMMANDS), (*EVERYONE, "onnx")),
    Room(
        "onnx_bridge",
        _KITS,
        (*EVERYONE, "onnx", "google.protobuf", "torch", "jax2onnx"),
    ),
    Room("torch_xla_bridge/cli", ("isoshard.torch_xla_bridge", *COMMANDS), EVERYONE),
    Room(
        "torch_xla_bridge",
        _KITS,
        (*EVERYONE, "torch", "torch_xla", "fsspec"),
    ),
    Room(
        "src/isoshard/cli",
        ("isoshard",),
        (*EVERYONE, "torch", "flax", "onnx", "optax", "matplotlib", "transformers"),
    ),
    Room(
        "src/isoshard",
        (*_HEART, "isoshard.cli", *(f"isoshard.{name}" for name in ANNEXES)),
        EVERYONE,
    ),
]
PRESENT = [room for room in ROOMS if (ROOT / room.folder).is_dir()]


def imports_of(source: ast.Module, package: str) -> Iterator[tuple[str, int, int]]:
    """Every module a source imports: (absolute name, line, relative level)."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            stem = ".".join([*base, node.module or ""][0 if node.level else -1 :]).rstrip(".")
            # `from isoshard import core` imports isoshard.core
            names = [f"{stem}.{alias.name}" for alias in node.names]
            yield from ((name, node.lineno, node.level) for name in names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno, 0


def offences(source: ast.Module, package: str, room: Room) -> list[str]:
    """Imports in `source`, a module of `package`, that do not belong in `room`."""
    wrong = []
    for name, line, level in imports_of(source, package):
        allowed = (room.package, *room.ours, *room.others, *sys.stdlib_module_names)
        if not any(name == root or name.startswith(f"{root}.") for root in allowed):
            wrong.append(f"line {line}: {name} has no place in {room.folder}")
        if level and not name.startswith(f"{room.package}."):
            wrong.append(f"line {line}: {name} is another room: import it by its absolute name")
    return wrong


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _package_of(path: Path, room: Room) -> str:
    inner = path.parent.relative_to(ROOT / room.folder).parts
    return ".".join([room.package, *inner])


def _files(room: Room) -> list[Path]:
    """The files of a folder, without those of a room inside it."""
    inner = [ROOT / other.folder for other in ROOMS if other.folder.startswith(f"{room.folder}/")]
    found = sorted((ROOT / room.folder).rglob("*.py"))
    return [path for path in found if not any(one in path.parents for one in inner)]


@pytest.mark.parametrize("room", PRESENT, ids=lambda room: room.folder)
def test_a_room_imports_only_what_it_may(room):
    with parsed(_files(room)) as trees:
        wrong = [
            f"{path.relative_to(ROOT)}: {offence}"
            for path, tree in trees.items()
            for offence in offences(tree, _package_of(path, room), room)
        ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_the_package_has_rules():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = set(setuptools["package-dir"].values())
    assert {folder for folder in folders if "/" not in folder} <= {room.folder for room in ROOMS}


def test_the_facade_loads_no_bridge_when_it_is_imported():
    tree = ast.parse((ROOT / "src/isoshard/__init__.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [name for name, *_ in imports_of(tree, "isoshard")]
    assert names
    assert not [name for name in names if "_bridge" in name or name.startswith("isoshard.cli")]


@pytest.mark.parametrize(
    ("source", "package", "folder", "found"),
    [
        ("import torch", "isoshard.core", "core", "torch has no place in core"),
        ("import jaxlib", "isoshard.core", "core", "jaxlib has no place in core"),
        ("def f():\n    import flax.nnx", "isoshard.core", "core", "line 2: flax.nnx"),
        ("from isoshard import torch_bridge", "isoshard.core", "core", "isoshard.torch_bridge"),
        ("from ..torch_bridge import spmd", "isoshard.core", "core", "isoshard.torch_bridge.spmd"),
        ("from isoshard.jax_bridge import x", "isoshard.torch_bridge", "torch_bridge", "no place"),
        ("from isoshard.planner import x", "isoshard.core", "core", "isoshard.planner.x"),
        ("from isoshard.domain import x", "isoshard.torch_bridge", "torch_bridge", "no place"),
        ("from isoshard.domain import x", "isoshard.planner", "planner", "no place in planner"),
        ("from isoshard.core.plan import x", "isoshard.planner", "planner", "isoshard.core.plan"),
        ("import isoshard", "isoshard.torch_bridge", "torch_bridge", "isoshard has no place"),
        ("from ...core import x", "isoshard.torch_bridge.engine", "torch_bridge", "absolute name"),
        ("import importlib\nimportlib.import_module('torch')", "isoshard.core", "core", "torch"),
    ],
)
def test_a_wrong_import_is_found(source, package, folder, found):
    room = next(room for room in ROOMS if room.folder == folder)
    assert found in "\n".join(offences(ast.parse(source), package, room))


@pytest.mark.parametrize(
    ("source", "package", "folder"),
    [
        ("from __future__ import annotations\nimport jax.numpy as jnp", "isoshard.core", "core"),
        ("from .mesh import Mesh\nfrom . import spec", "isoshard.core", "core"),
        ("from isoshard.core.kit import Plan", "isoshard.planner", "planner"),
        ("from ..dtypes import x", "isoshard.torch_bridge.engine", "torch_bridge"),
        (
            "from isoshard.core.layout.mesh import x\nimport torch",
            "isoshard.torch_bridge",
            "torch_bridge",
        ),
    ],
)
def test_a_right_import_is_let_through(source, package, folder):
    room = next(room for room in ROOMS if room.folder == folder)
    assert offences(ast.parse(source), package, room) == []
