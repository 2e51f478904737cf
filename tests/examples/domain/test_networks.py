"""The networks are the same in both frameworks, on one device and on a mesh."""

import doctest
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "domain"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"examples.domain.{name}")).failed == 0
