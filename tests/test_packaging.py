"""The wheel and the sdist hold what they should, and nothing can be imported under two names."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import isoshard

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
NOT_ROOMS = {
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "tools",
    "build",
    "dist",
}
ROOMS = [
    path.parent
    for path in sorted(ROOT.glob("[!.]*/**/__init__.py"))
    if path.relative_to(ROOT).parts[0] not in NOT_ROOMS
]


def _package_of(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts[1:] if parts[0] == "src" else ("isoshard", *parts))


def _modules_on_disk() -> set[str]:
    """Paths the wheel must hold, such as isoshard/core/layout/mesh.py."""
    return {
        f"{_package_of(folder).replace('.', '/')}/{path.name}"
        for folder in ROOMS
        for path in folder.glob("*.py")
    }


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist as pip would."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "out")
    shutil.copytree(ROOT, source, ignore=ignored)
    _build("build_sdist", source, folder)
    unpacked = folder / "unpacked"
    with tarfile.open(_only(folder, "*.tar.gz")) as sdist:
        sdist.extraction_filter = getattr(tarfile, "data_filter", None)  # Python >= 3.11.4
        sdist.extractall(unpacked)
    _build("build_wheel", _only(unpacked, "*"), folder)
    return folder


def _build(hook: str, source: Path, into: Path) -> None:
    program = f"import setuptools.build_meta as b; b.{hook}({str(into)!r})"
    subprocess.run(
        [sys.executable, "-c", program], cwd=source, check=True, capture_output=True, timeout=120
    )


def _only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_package_list_is_what_is_on_disk():
    assert sorted(SETUPTOOLS["packages"]) == sorted(map(_package_of, ROOMS))


def test_every_package_is_mapped_to_its_folder():
    on_disk = {_package_of(folder): folder.relative_to(ROOT).as_posix() for folder in ROOMS}
    assert SETUPTOOLS["package-dir"] == on_disk


def test_the_tests_run_the_code_of_this_checkout():
    assert Path(isoshard.__file__).is_relative_to(ROOT)


@pytest.mark.parametrize(
    "folder", [f for f in ROOMS if "src" not in f.parts], ids=lambda f: _package_of(f)
)
def test_a_room_refuses_a_second_name(folder):
    spec = importlib.util.spec_from_file_location(folder.name, folder / "__init__.py")
    with pytest.raises(ImportError, match=rf"\b{re.escape(_package_of(folder))}\b"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(_only(built, "*.whl")) as wheel:
        names = set(wheel.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == _modules_on_disk() | {"isoshard/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_is_enough_to_build_and_test(built):
    with tarfile.open(_only(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for f in ROOMS for path in f.glob("*.py")}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    files = {
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    }
    assert names >= sources | tests | files


def test_the_wheel_works_by_itself(built, tmp_path):
    """Away from the checkout: every module imports, and arrays are sharded by the wheel's code."""
    with zipfile.ZipFile(_only(built, "*.whl")) as wheel:
        wheel.extractall(tmp_path)
    program = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import isoshard
isoshard.simulate_devices(2)
for module in pkgutil.walk_packages(isoshard.__path__, "isoshard."):
    if not module.name.endswith("__main__"):
        assert importlib.import_module(module.name).__file__.startswith(sys.argv[1])
import numpy as np
x = isoshard.shard(np.ones((4, 2), np.float32), isoshard.make_mesh((2,), ("x",)), isoshard.P("x"))
print(len(x.addressable_shards))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "2\n", done.stderr


def test_every_dependency_is_pinned():
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(name for extra in extras for name in extra)]
    names = {name.partition(">")[0].partition("[")[0].lower() for name in wanted}
    assert names - pinned == {"isoshard"}


def test_the_version_is_in_the_changelog():
    assert f"## [{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()
