"""Exports of torch take seconds, so tests share them."""

import functools

import pytest


@pytest.fixture(scope="session")
def exported():
    """Call it with the name of a case of `exports.CASES`."""
    from tests.onnx_bridge.exports import export

    return functools.cache(export)
