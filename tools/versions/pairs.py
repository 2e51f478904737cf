"""The tested versions: for each Python the JAX and torch that are installed with it.

>>> PAIRS["oldest"].requirements
('jax==0.9.0', 'jaxlib==0.9.0', 'torch==2.10.0')
>>> PAIRS["newest"].constraints.name
'python3.13.txt'
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Pair(NamedTuple):
    """One set of versions.

    Attributes:
        python: major and minor version.
        jax: of jax and jaxlib; empty for the newest.
        torch: of torch; likewise.
        file: of its constraints, in `constraints/`; empty for none.
        why: who has it.
    """

    python: str
    jax: str
    torch: str
    file: str
    why: str

    @property
    def requirements(self) -> tuple[str, ...]:
        """What pip is to install, beside isoshard and its extras."""
        versions = {"jax": self.jax, "jaxlib": self.jax, "torch": self.torch}
        return tuple(
            f"{name}=={version}" if version else name for name, version in versions.items()
        )

    @property
    def constraints(self) -> Path | None:
        """The versions of all packages: those that pip gave when the pair was last renewed."""
        path = ROOT / "constraints" / self.file
        return path if self.file and path.exists() else None


PAIRS = {
    "reference": Pair("3.11", "0.10.2", "2.13.0", "python3.11.txt", "the figures of the docs"),
    "newest": Pair("3.13", "0.12.0.1", "2.15.0", "python3.13.txt", "pip on Python 3.12 or 3.13"),
    "newest-3.14": Pair("3.14", "0.12.0.1", "2.15.0", "python3.14.txt", "pip on Python 3.14"),
    "images": Pair("3.12", "0.11.2", "2.11.0", "python3.12.txt", "GPU images"),
    "oldest": Pair("3.11", "0.9.0", "2.10.0", "oldest.txt", "the oldest that isoshard takes"),
}
"""By name. A Python's own file, `python3.N.txt`, is what `make PYTHON=python3.N` installs."""

LATEST = "latest"


def pair(name: str) -> Pair:
    """A pair by its name.

    Args:
        name: of `PAIRS`; or "latest", what pip gives the running Python today.
    """
    if name == LATEST:
        return Pair(".".join(map(str, sys.version_info[:2])), "", "", "", "what pip gives today")
    return PAIRS[name]
