"""The wheel and the sdist hold what they should, install alone, and have one name for a thing."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import isoshard
from isoshard.cli import dispatch, probes
from isoshard.core.installation import HEART
from tests.doc_blocks import blocks

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
    """A folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "out")
    shutil.copytree(ROOT, source, ignore=ignored)
    for kind in ("sdist", "wheel"):
        program = f"import setuptools.build_meta as b; b.build_{kind}({str(folder)!r})"
        command = [sys.executable, "-c", program]
        subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
        if kind == "sdist":
            shutil.unpack_archive(_only(folder, "*.tar.gz"), folder / "unpacked", filter="data")
            [source] = (folder / "unpacked").iterdir()
    return folder


_OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]


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
    assert inside == _modules_on_disk() | {
        "isoshard/py.typed",
        *(f"isoshard/{house}/kit.pyi" for house in HEART),
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_is_enough_to_build_and_test(built):
    with tarfile.open(_only(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for f in ROOMS for path in f.glob("*.py")}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    files = {
        "pyproject.toml",
        *(path.relative_to(ROOT).as_posix() for path in (ROOT / "constraints").iterdir()),
        "Makefile",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    }
    assert names >= sources | tests | files


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel installed, away from the repository.

    What isoshard needs is seen where this Python has it: nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("clean") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    install = ["install", *_OFFLINE, "--no-compile", str(_only(built, "*.whl"))]
    _run([sys.executable, "-m", "pip", "--python", str(python), *install])
    return python


def _run(command: Sequence[str | Path], folder: Path | None = None, **more: str) -> str:
    """Run a command away from the repository, and give what it prints."""
    hidden = ("PYTHONPATH", "XLA_FLAGS", "CLONE_ROOT", "PIP_TARGET")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        command,
        cwd=folder or Path(command[0]).parent,
        env={**environment, "JAX_PLATFORMS": "cpu", **more},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_in_a_clean_environment(clean, tmp_path):
    """Torch finds the backend before isoshard is imported; a sample and the command run."""
    first, *_ = blocks((ROOT / "README.md").read_text())
    program = f"""
import json, sys, torch
assert "isoshard" in torch._dynamo.list_backends() and "isoshard" not in sys.modules
{first.code}
loaded = [m.__file__ for n, m in list(sys.modules.items()) if n.partition(".")[0] == "isoshard"]
print(json.dumps([sys.prefix, loaded]))
"""
    (tmp_path / "sample.py").write_text(program)
    *said, last = _run([clean, "sample.py"], tmp_path).splitlines()
    assert "float32[64, 256]" in "\n".join(said)
    prefix, loaded = json.loads(last)
    assert len(loaded) > 50 and all(Path(file).is_relative_to(prefix) for file in loaded)
    version = PROJECT["project"]["version"]
    assert _run([clean.parent / "isoshard", "--version"]) == f"isoshard {version}\n"


EXTRAS = PROJECT["project"]["optional-dependencies"]
REQUIRED = [
    *PROJECT["project"]["dependencies"],
    *(name for extra in EXTRAS.values() for name in extra),
]
_NAMED = re.compile(
    r"""isoshard\[([\w, -]+)\]|["']\.\[([\w,-]+)\]["']|install_command\(["']([\w-]+)["']"""
)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_dependency_is_pinned(python):
    """To a version that every extra allows, so extras resolve, alone and together."""
    lines = (ROOT / "constraints" / f"python{python}.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    for text in REQUIRED:
        wanted = Requirement(text)
        if wanted.name != "isoshard":
            assert wanted.specifier.contains(
                pinned[wanted.name.lower().replace("_", "-")].split()[0]
            ), text


def test_extras_name_extras_that_are_there(built):
    named = {extra for text in REQUIRED for extra in _extras_of(text)}
    assert named and named <= set(EXTRAS)
    with zipfile.ZipFile(_only(built, "*.whl")) as wheel:
        [file] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        given = re.findall(r"^Provides-Extra: (.+)$", wheel.read(file).decode(), re.M)
    assert set(given) == set(EXTRAS)


def test_extras_that_are_named_are_there():
    """By docs, messages, notebooks and the Makefile."""
    suffixes = {".py", ".md", ".ipynb", ".sh"}
    folders = {
        *(folder.relative_to(ROOT).parts[0] for folder in ROOMS),
        "docs",
        "examples",
        "tools",
    }
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files = [ROOT / "README.md", ROOT / "Makefile", *(f for f in files if f.suffix in suffixes)]
    named = {extra: path for path in files for extra in _extras_of(path.read_text())}
    assert len(named) > 3
    assert {extra: path for extra, path in named.items() if extra not in EXTRAS} == {}
    hints = {*dispatch.EXTRAS.values(), *probes._EXTRA.values(), "demo"}
    assert hints <= set(EXTRAS)


def _extras_of(text: str) -> set[str]:
    """The extras of isoshard that a text names."""
    found = ("".join(groups) for groups in _NAMED.findall(text))
    return {extra.strip() for names in found for extra in names.split(",")}


def test_the_version_is_in_the_changelog():
    assert f"## [{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()
