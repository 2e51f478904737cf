"""The examples in the docstrings."""

import doctest

import pytest

from tools.tiers import choice, sources, sweeps


@pytest.mark.parametrize("module", [choice, sources, sweeps], ids=lambda module: module.__name__)
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
