"""Where isoshard was installed from, and the pip command that adds one of its extras.

isoshard is installed from a package index, from a wheel file or from a checkout, so a message that
says how to get an extra has to name the same place. pip records it in `direct_url.json` of the
installed distribution (PEP 610), and records nothing for a package index.

>>> Origin({"url": "file:///home/me/isoshard", "dir_info": {"editable": True}}).command("torch")
'pip install -e "/home/me/isoshard[torch]"'
>>> Origin({"url": "file:///tmp/isoshard-0.1.0-py3-none-any.whl"}).command("onnx", "torch")
'pip install "/tmp/isoshard-0.1.0-py3-none-any.whl[onnx,torch]"'
>>> Origin({}).command("flax")
'pip install "isoshard[flax]"'
"""

from __future__ import annotations

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


class Origin:
    """Where isoshard was installed from.

    Args:
        direct_url: the record of PEP 610; empty for a package index.
    """

    def __init__(self, direct_url: Mapping[str, Any]):
        """See the class."""
        self.direct_url = direct_url

    @property
    def path(self) -> str:
        """The file or folder on this machine; "" if it was neither."""
        url = urllib.parse.urlsplit(self.direct_url.get("url", ""))
        return urllib.parse.unquote(url.path) if url.scheme == "file" and not self._vcs else ""

    @property
    def editable(self) -> bool:
        """Whether the modules of a checkout are used where they are."""
        return bool(self.direct_url.get("dir_info", {}).get("editable"))

    @property
    def _vcs(self) -> Mapping[str, str]:
        return self.direct_url.get("vcs_info", {})

    @property
    def _reference(self) -> str:
        """The URL as pip takes it after `isoshard @`."""
        url, folder = self.direct_url["url"], self.direct_url.get("subdirectory")
        if self._vcs:
            url = f"{self._vcs['vcs']}+{url}@{self._vcs['commit_id']}"
        return f"{url}#subdirectory={folder}" if folder else url

    def describe(self) -> str:
        """The origin in words.

        Example:
            >>> Origin({"url": "file:///src/isoshard", "dir_info": {}}).describe()
            'the checkout /src/isoshard, which is no longer there'
        """
        if not self.direct_url:
            return "a package index"
        if not self.path:
            return self._reference
        if "dir_info" in self.direct_url:
            kind = "checkout"
        else:
            kind = "wheel" if self.path.endswith(".whl") else "archive"
        missing = "" if os.path.exists(self.path) else ", which is no longer there"  # noqa: PTH110
        return f"the {kind} {self.path}{' (editable)' if self.editable else ''}{missing}"

    def command(self, *extras: str) -> str:
        """The pip command that adds extras from there.

        Args:
            *extras: such as "torch"; none installs isoshard alone.
        """
        brackets = f"[{','.join(extras)}]" if extras else ""
        if self.path:
            return f'pip install {"-e " if self.editable else ""}"{self.path}{brackets}"'
        if self.direct_url:
            return f'pip install "isoshard{brackets} @ {self._reference}"'
        return f'pip install "isoshard{brackets}"'


def origin() -> Origin:
    """Where the isoshard of this process was installed from.

    Where it was not installed at all (its folders are on `sys.path`), the current folder serves,
    which is right in a checkout.
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

    Args:
        *extras: such as "torch".

    Example:
        >>> install_command("torch").endswith('[torch]"')
        True
    """
    return origin().command(*extras)
