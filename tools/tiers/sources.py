"""The files of this repository: which there are, what they hold, and which of them they import.

>>> "core/layout/mesh.py" in package()
True
>>> "core/errors.py" in imported("core/layout/mesh.py")
True
>>> digest(["core/errors.py"]) == digest(["core/errors.py"]) != digest(["core/frameworks.py"])
True
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("src/isoshard", "core", "torch_bridge", "jax_bridge", "onnx_bridge")
_BESIDE = ("tests", "examples", "benchmarks", "tools")
_LENGTH = 12


def package(root: Path = ROOT) -> list[str]:
    """The Python files of the package, by their path in the repository, sorted."""
    return python_files(_ROOMS, root)


def python_files(folders: Iterable[str], root: Path = ROOT) -> list[str]:
    """The Python files below some folders, by their path in the repository, sorted."""
    found = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(path.relative_to(root).as_posix() for path in found)


def ours(filename: str, root: Path = ROOT) -> str | None:
    """The path in the repository of a file that runs; None if it is not of the repository."""
    prefix = f"{root}/"
    if not filename.startswith(prefix):
        return None
    path = filename[len(prefix) :]
    known = any(path.startswith(f"{folder}/") for folder in (*_ROOMS, *_BESIDE))
    return path if known else None


def digest(paths: Iterable[str], root: Path = ROOT) -> str:
    """A digest of the names and contents of files; one that is not there counts as missing."""
    whole = hashlib.sha256()
    for path in sorted(set(paths)):
        whole.update(f"{path}\0{_content(root / path)}\n".encode())
    return whole.hexdigest()[:_LENGTH]


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return "missing"


@functools.cache
def imported(path: str, root: Path = ROOT) -> frozenset[str]:
    """The files of the repository that a file names in its import statements."""
    try:
        tree = ast.parse((root / path).read_text())
    except (FileNotFoundError, SyntaxError):
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(_files(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            package = _module(path, node.level)
            base = ".".join(filter(None, (package, node.module)))
            found.update(_files([base, *(f"{base}.{alias.name}" for alias in node.names)]))
    return frozenset(name for name in found if name != path and (root / name).is_file())


def _module(path: str, level: int) -> str:
    """The package that a relative import of `level` dots in a file starts from; "" without dots."""
    if not level:
        return ""
    folder = Path(path).parent
    parts = folder.parts[1:] if folder.parts[:1] == ("src",) else folder.parts
    if folder.parts[0] not in ("src", *_BESIDE):
        parts = ("isoshard", *parts)
    return ".".join(parts[: len(parts) - level + 1])


def _files(modules: Iterable[str]) -> Iterable[str]:
    """Where modules may lie; not all of these files are there."""
    for module in modules:
        parts = module.split(".")
        if parts[0] == "isoshard":
            rest = "/".join(parts[1:])
            stems = [rest, f"src/isoshard/{rest}"] if rest else ["src/isoshard"]
        else:
            stems = ["/".join(parts)]
        for stem in stems:
            yield f"{stem}.py"
            yield f"{stem}/__init__.py"
