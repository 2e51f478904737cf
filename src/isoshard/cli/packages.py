"""The packages that isoshard uses, read from metadata: nothing is imported.

>>> [package.name for package in packages() if package.extra is None]
['isoshard', 'python', 'jax', 'jaxlib', 'numpy', 'rich']
>>> Package("torch", "2.1.0+cpu", ">=2.10", "torch").problem
'2.1.0+cpu is too old'
>>> Package("jax", "0.12.0.1", "<0.11,>=0.9", None).problem
'0.12.0.1 is too new'
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Collection

from isoshard.core.installation import install_command
from isoshard.core.runtime.private_names import TRIED, is_tried, release

EXTRAS = {
    "torch": "PyTorch on the mesh",
    "flax": "Flax modules, optax",
    "checkpoint": "save and restore",
    "onnx": "ONNX models",
    "onnx-torch": "export from torch",
    "onnx-jax": "export from JAX",
    "models": "plan models of transformers",
    "demo": "isoshard demo",
}
"""The extras that serve users, with their purpose; the others serve tests, docs and notebooks."""

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Environment variable of torch: whether `import torch` loads other packages' backends."""

_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[\w, -]+)\])?\s*(?P<needs>(?:(?:>=|<)[\d.]+,?)*)"""
    r"""\s*(?:;\s*extra == ["'](?P<extra>[\w-]+)["'])?"""
)


@dataclasses.dataclass(frozen=True)
class Package:
    """A package isoshard can use.

    Attributes:
        name: as pip calls it.
        version: the installed one; None if it is not installed.
        needs: the versions isoshard takes, such as "<0.11,>=0.9".
        extra: the extra of isoshard that installs it; None if isoshard always does.
    """

    name: str
    version: str | None
    needs: str
    extra: str | None

    @property
    def problem(self) -> str:
        """Why isoshard cannot use it; empty if it can."""
        if self.version is None:
            return "not installed"
        for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", self.needs):
            below = release(self.version) < release(re.sub(r"(\.0)+$", "", bound))  # 2.0 is 2.0.0
            if below != (operator == "<"):
                return f"{self.version} is too {'old' if below else 'new'}"
        return ""

    @property
    def tried(self) -> str:
        """The versions that isoshard was tried with, such as "2.10 to 2.15"; empty for any."""
        return TRIED.get(self.name, "")

    @property
    def untried(self) -> str:
        """Words for a version that isoshard takes, and was not tried with; empty for others."""
        if self.problem or not self.tried or is_tried(self.version or "", self.tried):
            return ""
        return "newer than isoshard has been tried with"

    @property
    def fix(self) -> str:
        """The command that installs the right version; empty without a problem."""
        if not self.problem:
            return ""
        if self.name == "python":
            return f"use Python {self.needs}"
        if self.version is not None:
            return f'pip install "{self.name}{self.needs}"'
        return install_command(*(extra for extra in (self.extra,) if extra))


def packages() -> list[Package]:
    """The packages that isoshard always needs, then those of users' extras that are installed."""
    requirements = _requirements()
    always = [_package(match) for match in requirements if match["extra"] is None]
    after_jax = [package.name for package in always].index("jax") + 1
    always.insert(after_jax, Package("jaxlib", version_of("jaxlib"), "", None))
    optional = [
        _package(match)
        for extra in EXTRAS
        for match in requirements
        if match["extra"] == extra and match["name"] != "isoshard"
    ]
    return [
        Package("isoshard", version_of("isoshard"), "", None),
        Package("python", platform.python_version(), _requires_python(), None),
        *always,
        *(package for package in optional if package.version is not None),
    ]


def missing_extras() -> list[str]:
    """The extras for users of which a package is not installed."""
    needed: dict[str, set[str]] = {extra: set() for extra in EXTRAS}
    inner: dict[str, set[str]] = {extra: set() for extra in EXTRAS}
    for match in _requirements():
        if match["extra"] in EXTRAS and match["name"] == "isoshard":
            inner[match["extra"]].update(re.findall(r"[\w-]+", match["extras"]))
        elif match["extra"] in EXTRAS:
            needed[match["extra"]].add(match["name"])

    def complete(extra: str) -> bool:
        return all(map(version_of, needed[extra])) and all(map(complete, inner[extra]))

    return [extra for extra in EXTRAS if not complete(extra)]


def outside_tried(names: Collection[str]) -> list[Package]:
    """The installed packages whose version is not one that isoshard was tried with.

    Args:
        names: of `TRIED`.
    """
    return [package for package in _tried(names) if package.problem or package.untried]


def tried_versions(names: Collection[str]) -> str:
    """The versions that isoshard was tried with, the installed ones, and what to install.

    Args:
        names: of `TRIED`.
    """
    tried = " and ".join(f"{package.name} {package.tried}" for package in _tried(names))
    installed = " and ".join(f"{package.name} {package.version}" for package in _tried(names))
    ranges = [f'"{package.name}{_range(package.tried)}"' for package in outside_tried(names)]
    fix = f"pip install {' '.join(ranges)}" if ranges else "reinstall what cannot be imported"
    return f"isoshard was tried with {tried} (installed: {installed}): {fix}"


def _range(tried: str) -> str:
    """Such as ">=2.10,<2.16" of "2.10 to 2.15": the releases of the newest are within it."""
    oldest, newest = tried.split(" to ")
    *major, minor = release(newest)
    return f">={oldest},<{'.'.join(map(str, (*major, minor + 1)))}"


def torch_tpu_warning() -> str:
    """What to mind where `torch_tpu` is installed as well; empty if it is not.

    It registers itself as a backend, which `import torch` loads: without libtpu that ends the
    process (torch_tpu 0.2.0).
    """
    if version_of("torch_tpu") is None:
        return ""
    if version_of("libtpu") is None:
        negation = "" if os.environ.get(_AUTOLOAD) == "0" else "not "
        return (
            "torch_tpu is installed without libtpu: a bare `import torch` ends the process unless "
            f"{_AUTOLOAD}=0 is set, which is {negation}so here"
        )
    return (
        "torch_tpu is installed: on a TPU it and isoshard both want torch's PrivateUse1 slot; use "
        f"one of them in a process ({_AUTOLOAD}=0 keeps `import torch` from loading torch_tpu)"
    )


def version_of(name: str) -> str | None:
    """The installed version of a package; None if it is not installed.

    Args:
        name: as pip calls it.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tried(names: Collection[str]) -> list[Package]:
    return [package for package in packages() if package.name in names and package.tried]


def _requirements() -> list[re.Match[str]]:
    return [_parsed(text) for text in importlib.metadata.requires("isoshard") or ()]


def _parsed(requirement: str) -> re.Match[str]:
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ValueError(f"isoshard's metadata has a requirement doctor cannot read: {requirement}")
    return match


def _package(match: re.Match[str]) -> Package:
    return Package(match["name"], version_of(match["name"]), match["needs"], match["extra"])


def _requires_python() -> str:
    return importlib.metadata.metadata("isoshard")["Requires-Python"]
