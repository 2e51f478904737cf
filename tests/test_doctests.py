"""Every example in every docstring, on eight devices."""

import doctest
import importlib
import tomllib
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
MODULES = sorted(
    package if path.stem == "__init__" else f"{package}.{path.stem}"
    for package, folder in FOLDERS.items()
    for path in (ROOT / folder).glob("*.py")
    if path.stem != "__main__"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    precision = jax.config.jax_default_matmul_precision
    try:
        result = doctest.testmod(importlib.import_module(name))
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    assert result.failed == 0, f"{name}: see the output above"


def test_the_rooms_are_found():
    assert {"isoshard.core.layout.spec", "isoshard.core.layout.tiles", "isoshard.metrics"} <= set(
        MODULES
    )
    assert doctest.testmod(importlib.import_module("isoshard.core.layout.spec")).attempted > 10


def test_a_wrong_example_is_found(capsys):
    module = type(doctest)("wrong", ">>> 1 + 1\n3\n")
    assert doctest.testmod(module).failed == 1
    assert "Expected" in capsys.readouterr().out
