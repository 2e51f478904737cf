"""docs/troubleshooting.md says of every error and warning what it means and what to do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FOLDERS = ("core", "jax_bridge", "torch_bridge", "onnx_bridge", "src/isoshard")
SECTION = re.compile(r"^### (?P<name>\w+)\n(?P<text>[^#]+)", re.M)
SECTIONS = {match["name"]: match["text"].strip() for match in SECTION.finditer(PAGE)}


def classes() -> set[str]:
    """The package's classes of errors and warnings."""
    return {
        node.name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and re.fullmatch(r"[A-Z]\w*(Error|Warning)", node.name)
    }


def test_each_class_has_a_section():
    assert len(classes()) > 25
    assert set(SECTIONS) == classes()


def test_a_section_says_something():
    assert [name for name, text in SECTIONS.items() if len(text.split()) < 8] == []
