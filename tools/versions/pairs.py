"""The tested versions: for each Python the JAX and torch that are installed with it.

>>> PAIRS["oldest"].requirements
('jax==0.9.0', 'jaxlib==0.9.0', 'torch==2.10.0')
>>> PAIRS["newest"].constraints.name
'python3.13.txt'
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Pair(NamedTuple):
    """One set of versions.

    Attributes:
        python: major and minor version.
        jax: of jax and jaxlib.
        torch: of torch.
        file: of its constraints, in `constraints/`.
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
        return (f"jax=={self.jax}", f"jaxlib=={self.jax}", f"torch=={self.torch}")

    @property
    def constraints(self) -> Path:
        """The versions of all packages: those that pip gave when the pair was last renewed."""
        return ROOT / "constraints" / self.file


PAIRS = {
    "reference": Pair("3.11", "0.10.2", "2.13.0", "python3.11.txt", "the figures of the docs"),
    "newest": Pair("3.13", "0.12.0.1", "2.15.0", "python3.13.txt", "pip on Python 3.12 or 3.13"),
    "newest-3.14": Pair("3.14", "0.12.0.1", "2.15.0", "python3.14.txt", "pip on Python 3.14"),
    "images": Pair("3.12", "0.11.2", "2.11.0", "python3.12.txt", "GPU images"),
    "oldest": Pair("3.11", "0.9.0", "2.10.0", "oldest.txt", "the oldest that isoshard takes"),
}
"""By name. A Python's own file, `python3.N.txt`, is what `make PYTHON=python3.N` installs."""
