"""docs/torch_xla.md has a word for every public name of the real torch_xla's SPMD world."""

from __future__ import annotations

import importlib
import pkgutil
import re
import types
from pathlib import Path

import pytest
import torch_xla

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "torch_xla.md").read_text()
SECTIONS = {
    part.partition("`")[0]: part for part in re.split(r"^## `", PAGE, flags=re.MULTILINE)[1:]
}
PRIVATE = re.compile(r"\._(?!XLAC|dynamo|internal\.tpu|helpers)|\.proto|_pb2|\.experimental\.tpu")
# Type variables, constants of a module's own, and what a package of one class is made of.
SPLIT = ("torch_xla.amp.syncfree.", "torch_xla.experimental.pallas_kernels.", "torch_xla._dynamo.")
NAMELESS = {"FN", "R", "PyTreeA", "PyTreeB", "Carry", "U", "X", "Y", "inf", "FLOAT_DTYPES"}
NAMELESS |= {"RICH_ENABLED", "PartitionSpec"}


def modules() -> list[str]:
    """Every public module of torch_xla."""
    found = [info.name for info in pkgutil.walk_packages(torch_xla.__path__, "torch_xla.")]
    return [name for name in found if not PRIVATE.search(name) and not name.startswith(SPLIT)]


def names(module: types.ModuleType) -> list[str]:
    """What a module defines, or a package offers."""
    package = hasattr(module, "__path__")
    found = []
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None)
        own = home == module.__name__ or (package and str(home).startswith("torch_xla"))
        if own and not name.startswith("_") and not isinstance(value, types.ModuleType):
            found.append(name)
    return found


@pytest.mark.parametrize("name", modules())
def test_the_page_has_a_word_for(name):
    if name not in SECTIONS:
        bare = not names(importlib.import_module(name)) if f"`{name}`" not in PAGE else True
        assert bare, f"docs/torch_xla.md says nothing of the module {name}"
        return
    missing = [
        member
        for member in names(importlib.import_module(name))
        if member not in NAMELESS and f"`{member}`" not in SECTIONS[name]
    ]
    assert not missing, f"docs/torch_xla.md says nothing of {name}: {missing}"
