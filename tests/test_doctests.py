"""Every example in every docstring, on eight devices."""

import doctest
import importlib
import linecache
import re
import tomllib
from pathlib import Path
from types import ModuleType

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

CODES = re.compile(r"^ISO\d{3}: .*\n", re.MULTILINE)


class Checker(doctest.OutputChecker):
    """Examples show errors without the note of their code, which is the same for a class."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, CODES.sub("", got), optionflags)


def run(module: ModuleType) -> doctest.TestResults:
    runner = doctest.DocTestRunner(Checker())
    for test in doctest.DocTestFinder().find(module):
        runner.run(test)
    return doctest.TestResults(runner.failures, runner.tries)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Doctest looks before each docstring whether any source file has changed.
    monkeypatch.setattr(linecache, "checkcache", lambda filename=None: None)
    precision = jax.config.jax_default_matmul_precision
    try:
        result = run(importlib.import_module(name))
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    assert result.failed == 0, f"{name}: see the output above"


def test_the_rooms_are_found():
    assert {"isoshard.core.layout.spec", "isoshard.core.layout.tiles", "isoshard.metrics"} <= set(
        MODULES
    )
    assert run(importlib.import_module("isoshard.core.layout.spec")).attempted > 10


def test_a_wrong_example_is_found(capsys):
    module = type(doctest)("wrong", ">>> 1 + 1\n3\n")
    assert run(module).failed == 1
    assert "Expected" in capsys.readouterr().out
