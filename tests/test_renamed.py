"""Modules by their old names: what users may have imported warns, and is the same module."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from isoshard._renamed import MOVED, RENAMED

ROOT = Path(__file__).resolve().parents[1]
_IMPORT = """
import sys, warnings
import isoshard
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always", DeprecationWarning)
    import {old} as old
import {new} as new
(first,) = [one for one in given if "is now" in str(one.message)]
assert first.filename == "<string>", first.filename
print(first.message)
assert old is new and new.__spec__.name == new.__name__ == "{new}"
"""


def test_an_old_name_warns_once_and_is_the_new_module():
    old = "isoshard.core.mesh"
    code = _IMPORT.format(old=old, new=RENAMED[old])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"{old} is now {RENAMED[old]}; "), done.stderr


@pytest.mark.parametrize("old", RENAMED)
def test_every_old_name_imports(old, monkeypatch):
    package, _, name = old.rpartition(".")
    package = importlib.import_module(package)
    if name in vars(package):  # a function of that name, which Python's import replaces
        monkeypatch.setattr(package, name, vars(package)[name])
    with pytest.warns(DeprecationWarning, match=f"^{old} is now"):
        sys.modules.pop(old, None)
        __import__(old)
    assert sys.modules[old] is sys.modules[RENAMED[old]]
    sys.modules.pop(old)


@pytest.mark.parametrize("old", MOVED)
def test_what_users_import_goes_on_without_a_warning(old):
    assert importlib.import_module(old) is importlib.import_module(MOVED[old])


def test_modules_inside_a_moved_package_are_the_same():
    old = importlib.import_module("isoshard.torch_bridge.torch_xla.core.xla_model")
    assert old.__name__ == "isoshard.torch_xla_bridge.torch_xla.core.xla_model"
    with pytest.raises(ModuleNotFoundError, match=r"torch_bridge\.torch_xla\.nothing"):
        importlib.import_module("isoshard.torch_bridge.torch_xla.nothing")


@pytest.mark.parametrize("old", RENAMED)
def test_the_table_of_the_changelog_has_it(old):
    row = f"| `{old}` | `{RENAMED[old]}` |"
    assert row in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "name", ["isoshard.torch_bridge.engine.tape", "isoshard.core.moves", "isoshard.core.nothing"]
)
def test_private_names_are_gone(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        __import__(name)
