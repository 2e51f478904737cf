"""The package as one folder, for tools that read sources and follow no mapping of folders."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path


def lay_out(target: Path, root: Path) -> None:
    """Make `target/isoshard`, a folder of links to where pyproject.toml says its parts are.

    Args:
        target: a folder; what is there is replaced.
        root: the repository.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"]
    top = root / folders["isoshard"]
    if target.exists():
        shutil.rmtree(target)
    tree = target / "isoshard"
    tree.mkdir(parents=True)
    for path in top.iterdir():
        (tree / path.name).symlink_to(path)
    for package, folder in folders.items():
        _, _, name = package.partition(".")
        if name and "." not in name and not (root / folder).is_relative_to(top):
            (tree / name).symlink_to(root / folder)
