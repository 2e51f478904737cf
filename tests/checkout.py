"""A mark for tests that need isoshard imported from this checkout, not from a wheel."""

from pathlib import Path

import pytest

import isoshard.core

ROOT = Path(__file__).resolve().parent.parent

of_this_checkout = pytest.mark.skipif(
    not Path(isoshard.core.__file__).is_relative_to(ROOT / "core"),
    reason="isoshard is imported from a wheel, not from this checkout",
)
