"""A JAX or torch outside the tested range: one warning at import, at the user's line."""

import warnings

import pytest

from isoshard.core.errors import UntestedVersionWarning
from isoshard.core.runtime.private_names import PrivateNames
from tests import fresh

CASES = [
    ("jax", "0.13.0", "0.9 to 0.12"),
    ("torch", "2.16.0+cpu", "2.10 to 2.15"),
]
IMPORTED = f"""
import importlib, warnings
import jax, torch
from isoshard.core.runtime._jax_internals import declared as of_jax
from isoshard.torch_bridge._torch_internals import declared as of_torch
jax.__version__, torch.__version__ = {[version for _, version, _ in CASES]}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    importlib.reload(of_jax), importlib.reload(of_torch)
for warning in caught:
    print(warning.category.__name__, warning.filename, warning.message)
"""


def test_an_untested_version_warns_once_at_import(tmp_path):
    got = fresh.run(IMPORTED, cwd=tmp_path)
    assert got.stdout.splitlines() == [
        f"UntestedVersionWarning {tmp_path / 'program.py'} {package} {version} is installed, and "
        f"isoshard was tested with {package} {tested} only; if something fails, install one of "
        "these [ISO015]"
        for package, version, tested in CASES
    ], got.stderr


@pytest.mark.parametrize("version", ["1.26.0", "2.4", "2.4.6", "2.4.6.dev1+local", "1.27"])
def test_tested_versions_are_silent(version, monkeypatch):
    monkeypatch.setattr("numpy.__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivateNames("numpy", versions="1.26 to 2.4").warn_if_untested()


@pytest.mark.parametrize("version", ["1.25.2", "2.5.0", "3"])
def test_others_are_not(version, monkeypatch):
    monkeypatch.setattr("numpy.__version__", version)
    with pytest.warns(UntestedVersionWarning, match=rf"numpy {version} is installed"):
        PrivateNames("numpy", versions="1.26 to 2.4").warn_if_untested()
