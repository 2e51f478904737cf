"""docs/troubleshooting.md says of every error and warning what it means and what to do."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import traceback
from pathlib import Path

import pytest

from isoshard.core.errors import RecompilationWarning, SpecError
from isoshard.core.installation import ANNEXES, HEART
from isoshard.planner.programs.targets import CompilationTimeoutError
from isoshard.torch_bridge.spmd.mark_errors import MarkSpecError

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FOLDERS = (*HEART, *ANNEXES, "src/isoshard")
SECTION = re.compile(r"^### (?P<title>ISO\d{3} \w+)\n(?P<text>.*?)(?=^#|\Z)", re.M | re.S)
SECTIONS = {match["title"]: match["text"].strip() for match in SECTION.finditer(PAGE)}
CODED = re.compile(r"class (\w+)\(.*code=\"(ISO\d{3})\"\):")


@functools.cache
def source() -> str:
    """All of the package."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join(path.read_text() for path in paths)


def classes() -> set[str]:
    """The package's classes of errors and warnings."""
    return set(re.findall(r"^ *class ((?!Coded)[A-Z]\w*(?:Error|Warning))\b", source(), re.M))


def codes() -> list[tuple[str, str]]:
    """The classes that have a code, and the codes, as the sources say."""
    return CODED.findall(source())


def test_each_class_has_a_code_of_its_own():
    found = codes()
    assert len(classes()) > 25
    assert {name for name, _ in found} == classes()
    assert len({code for _, code in found}) == len(found) == len(classes())


def test_each_class_has_a_section():
    assert set(SECTIONS) == {f"{code} {name}" for name, code in codes()}


def test_a_section_has_the_cause_and_the_fix():
    for title, text in SECTIONS.items():
        cause, _, fix = text.partition("\n\n**Fix.** ")
        assert len(cause.split()) >= 5 and len(fix.split()) >= 5, title


def test_the_code_ends_a_traceback_and_the_message_stays():
    error = SpecError("w: no axis 'z'")
    assert str(error) == "w: no axis 'z'"
    lines = traceback.format_exception_only(error)
    assert lines[0] == "isoshard.core.errors.SpecError: w: no axis 'z'\n"
    assert lines[1:] == ["ISO002: cause and fix in docs/troubleshooting.md#iso002-specerror\n"]
    assert "### ISO002 SpecError" in PAGE


@pytest.mark.parametrize("kind", [SpecError, CompilationTimeoutError, MarkSpecError])
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_a_code_goes_along_once(kind, again):
    error = kind("w: no axis 'z'")
    error.add_note("in the third layer")
    for one in (again(error), again(again(error))):
        assert type(one) is kind and str(one) == "w: no axis 'z'"
        assert [note.partition(":")[0] for note in one.__notes__] == [
            kind.code,
            "in the third layer",
        ]
    assert kind("other").__notes__ != error.__notes__


def test_a_warning_says_its_code_once():
    warning = RecompilationWarning("train.py:3: 9 programs")
    assert str(pickle.loads(pickle.dumps(warning))) == "train.py:3: 9 programs [ISO021]"
    assert "ISO" not in "".join(getattr(warning, "__notes__", []))


def test_a_private_class_has_the_code_of_its_base():
    class Narrower(SpecError):
        """None of its own."""

    assert Narrower("w").__notes__ == SpecError("w").__notes__
