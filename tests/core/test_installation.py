"""Where isoshard came from, and the commands that install extras from there."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from isoshard.core import frameworks, installation
from isoshard.core.installation import ANNEXES, HEART, Origin, install_command, origin

EDITABLE = {"url": "file:///home/me/isoshard", "dir_info": {"editable": True}}
FOLDER = {"url": "file:///home/me/my%20isoshard", "dir_info": {}}
WHEEL = {"url": "file:///path/isoshard-0.1.0-py3-none-any.whl", "archive_info": {}}
REMOTE = {"url": "https://example.org/isoshard-0.1.0.tar.gz", "archive_info": {}}
GIT = {
    "url": "https://example.org/isoshard.git",
    "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"},
}
INSIDE = {**GIT, "subdirectory": "python"}


@pytest.fixture
def recorded(monkeypatch):
    """Let the installed distribution have this `direct_url.json`."""

    def put(text):
        class Installed:
            def read_text(self, name):
                assert name == "direct_url.json"
                return text

            def locate_file(self, path):
                return Path("/site-packages") / path

        monkeypatch.setattr(installation.importlib.metadata, "distribution", lambda _: Installed())

    return put


@pytest.mark.parametrize(
    ("direct_url", "command", "words"),
    [
        (
            EDITABLE,
            'pip install -e "/home/me/isoshard[torch]"',
            "the checkout /home/me/isoshard (ed",
        ),
        (FOLDER, 'pip install "/home/me/my isoshard[torch]"', "the checkout /home/me/my isoshard"),
        (
            WHEEL,
            'pip install "/path/isoshard-0.1.0-py3-none-any.whl[torch]"',
            "the wheel /path/isoshard-0.1.0-py3-none-any.whl, which no longer exists",
        ),
        (REMOTE, f'pip install "isoshard[torch] @ {REMOTE["url"]}"', REMOTE["url"]),
        (GIT, f'pip install "isoshard[torch] @ git+{GIT["url"]}@abc"', f"git+{GIT['url']}@abc"),
        (
            INSIDE,
            f'pip install "isoshard[torch] @ git+{GIT["url"]}@abc#subdirectory=python"',
            f"git+{GIT['url']}@abc#subdirectory=python",
        ),
        (None, 'pip install "isoshard[torch]"', "a package index"),
    ],
)
def test_the_command_installs_from_where_isoshard_came(recorded, direct_url, command, words):
    recorded(None if direct_url is None else json.dumps(direct_url))
    assert install_command("torch") == command
    assert origin().describe().startswith(words)
    assert install_command("onnx", "torch") == command.replace("[torch]", "[onnx,torch]")
    if direct_url is EDITABLE:
        assert install_command() == 'pip install -e "/home/me/isoshard"'


def test_egg_info_in_a_checkout_is_that_checkout(tmp_path, monkeypatch):
    """`python -m isoshard` in a checkout finds what setuptools left there, before site-packages."""
    (tmp_path / "pyproject.toml").touch()
    egg = tmp_path / "isoshard.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: isoshard\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert installation.origin().describe() == f"the checkout {tmp_path} (editable)"


def test_modules_that_were_not_installed(monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation.importlib.metadata, "distribution", none)
    assert install_command("torch") == 'pip install ".[torch]"'


def test_pip_takes_the_command_and_records_what_is_read(tmp_path):
    """The record of a real installation, from a wheel file in a folder with a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    wheel = _wheel(folder)
    target = tmp_path / "target"
    _pip("install", "--no-index", "--no-deps", "--target", str(target), f"{wheel}[torch]")
    [file] = target.glob("isoshard-*.dist-info/direct_url.json")
    command = Origin(json.loads(file.read_text())).command("torch")
    assert command == f'pip install "{wheel}[torch]"'


def _wheel(folder: Path) -> Path:
    import zipfile

    path = folder / "isoshard-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = "isoshard-0.1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: isoshard\nVersion: 0.1.0\nProvides-Extra: torch\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def _pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_messages_of_missing_frameworks_have_the_command(recorded, monkeypatch):
    recorded(json.dumps(WHEEL))

    def load():
        raise ModuleNotFoundError("No module named 'flax'", name="flax")

    monkeypatch.delitem(sys.modules, "flax", raising=False)
    monkeypatch.setattr(frameworks, "_frameworks", {})
    monkeypatch.setattr(frameworks, "_loaders", {"flax": load})
    with pytest.raises(ImportError, match=r'get it with pip install "/path/isoshard.*\[flax\]"'):
        frameworks.require("flax")


def test_no_message_names_a_package_index():
    """Of the package and the docs: the commands are made by `install_command`, or are for `.`."""
    root = Path(__file__).resolve().parents[2]
    folders = [root / name for name in (*HEART, *ANNEXES, "src")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    files += [root / "README.md", *(root / "docs").rglob("*.md")]
    wrong = [
        path.relative_to(root).as_posix()
        for path in files
        if "pip install isoshard" in (text := path.read_text())
        or 'pip install "isoshard[' in text
        or "'isoshard[" in text
    ]
    assert wrong == ["core/installation.py"]  # which makes them
