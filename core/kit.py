"""What annexes use of this package, by name: private, of this version only; see `kit.pyi`."""

from pathlib import Path
from typing import Any

from isoshard.core.lazy_names import LazyNames

_NAMES = LazyNames.of_stub("isoshard.core.kit", Path(__file__).with_suffix(".pyi").read_text())


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    value = globals()[name] = _NAMES.load(name)
    return value


def __dir__() -> list[str]:
    """The names of the stub."""
    return dir(_NAMES)
