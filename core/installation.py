"""The origin of the isoshard installation, and the pip command that adds an extra to it.

isoshard is installed from a package index, from a wheel file or from a checkout, so a message on
how to install an extra must name the same source. pip records it in `direct_url.json` of the
installed distribution (PEP 610), except for a package index.

>>> Origin({"url": "file:///home/me/isoshard", "dir_info": {"editable": True}}).command("torch")
'pip install -e "/home/me/isoshard[torch]"'
>>> Origin({"url": "file:///tmp/isoshard-0.1.0-py3-none-any.whl"}).command("onnx", "torch")
'pip install "/tmp/isoshard-0.1.0-py3-none-any.whl[onnx,torch]"'
>>> Origin({}).command("flax")
'pip install "isoshard[flax]"'
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Any

HEART = ("core", "jax_bridge", "torch_bridge")
"""The folders that need no annex: docs/architecture.md."""

ANNEXES = ("planner", "domain", "onnx_bridge", "torch_xla_bridge")
"""Folders that import the heart, and that it calls by `core/extensions.py` alone."""


def source_folders() -> tuple[pathlib.Path, ...]:
    """The folders that the package's modules are in, of a checkout or of an installed package."""
    core = pathlib.Path(__file__).parent
    names = (*HEART, *ANNEXES, "src/isoshard", "cli")
    return tuple(core.parent / name for name in names)


@functools.cache
def source_digest() -> str:
    """A hash of the package's modules: two checkouts of one version may differ.

    Example:
        >>> len(source_digest())
        64
    """
    digest = hashlib.sha256()
    for folder in source_folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Origin:
    """The origin of an installation.

    Args:
        direct_url: the record of PEP 610; empty for a package index.
    """

    def __init__(self, direct_url: Mapping[str, Any]):
        """See the class."""
        self.direct_url = direct_url

    @property
    def path(self) -> str:
        """The local file or folder; "" if it was neither."""
        url = urllib.parse.urlsplit(self.direct_url.get("url", ""))
        return urllib.parse.unquote(url.path) if url.scheme == "file" and not self._vcs else ""

    @property
    def editable(self) -> bool:
        """Whether it is an editable install of a checkout."""
        return bool(self.direct_url.get("dir_info", {}).get("editable"))

    @property
    def _vcs(self) -> Mapping[str, str]:
        return self.direct_url.get("vcs_info", {})

    @property
    def _reference(self) -> str:
        """The URL in pip's syntax, after `isoshard @`."""
        url, folder = self.direct_url["url"], self.direct_url.get("subdirectory")
        if self._vcs:
            url = f"{self._vcs['vcs']}+{url}@{self._vcs['commit_id']}"
        return f"{url}#subdirectory={folder}" if folder else url

    def describe(self) -> str:
        """The origin as text.

        Example:
            >>> Origin({"url": "file:///src/isoshard", "dir_info": {}}).describe()
            'the checkout /src/isoshard, which no longer exists'
        """
        if not self.direct_url:
            return "a package index"
        if not self.path:
            return self._reference
        if "dir_info" in self.direct_url:
            kind = "checkout"
        else:
            kind = "wheel" if self.path.endswith(".whl") else "archive"
        missing = "" if os.path.exists(self.path) else ", which no longer exists"  # noqa: PTH110
        return f"the {kind} {self.path}{' (editable)' if self.editable else ''}{missing}"

    def command(self, *extras: str) -> str:
        """The pip command that adds extras, such as "torch", from this origin."""
        brackets = f"[{','.join(extras)}]" if extras else ""
        if self.path:
            return f'pip install {"-e " if self.editable else ""}"{self.path}{brackets}"'
        if self.direct_url:
            return f'pip install "isoshard{brackets} @ {self._reference}"'
        return f'pip install "isoshard{brackets}"'


def origin() -> Origin:
    """The origin of this process's isoshard.

    If it is not installed (its folders are on `sys.path`), that is the current folder, which is
    right in a checkout.
    """
    try:
        distribution = importlib.metadata.distribution("isoshard")
    except importlib.metadata.PackageNotFoundError:
        return Origin({"url": "file:.", "dir_info": {}})
    folder = pathlib.Path(str(distribution.locate_file("")))
    if (folder / "pyproject.toml").exists():  # setuptools' isoshard.egg-info, found from a checkout
        return Origin({"url": folder.resolve().as_uri(), "dir_info": {"editable": True}})
    return Origin(json.loads(distribution.read_text("direct_url.json") or "{}"))


def install_command(*extras: str) -> str:
    """The pip command that adds extras to this installation, for messages.

    Example:
        >>> install_command("torch").endswith('[torch]"')
        True
    """
    return origin().command(*extras)
