"""The table of lowerings: one function for one operator."""

import pytest

import isoshard.torch_bridge  # noqa: F401  (fills the table)
from isoshard.torch_bridge.lowerings.registry import lower, named


def test_an_operator_has_one_lowering():
    before = named("aten::relu")
    with pytest.raises(ValueError, match="aten::relu has a lowering already"):
        lower("aten::relu")(lambda x: x)
    assert named("aten::relu") is before
