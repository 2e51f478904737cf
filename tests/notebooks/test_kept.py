"""What stands in the notebooks, without running them; `make notebooks` does that."""

import re
from pathlib import Path

import pytest

from examples.notebooks import comparing, running

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


@pytest.fixture(params=NAMES)
def notebook(request):
    return running.read(FOLDER / f"{request.param}.ipynb")


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_seven_are_there():
    assert NAMES == [
        "both_at_once",
        "domain",
        "first_steps_in_jax",
        "first_steps_in_pytorch",
        "from_torch_xla",
        "onnx",
        "planning",
    ]


def test_it_was_run_from_top_to_bottom_without_a_word_on_stderr(notebook):
    assert [cell.execution_count for cell in code(notebook)] == [*range(1, len(code(notebook)) + 1)]
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5


def test_it_keeps_nothing_of_a_machine(notebook):
    assert notebook.metadata == running.METADATA
    assert comparing.private(notebook) == []


def test_its_cells_are_short(notebook):
    assert max(len(cell.source.splitlines()) for cell in notebook.cells) <= 35
    assert notebook.cells[0].source.startswith("# ")


def test_its_links_lead_somewhere(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = {"#" + h.replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    links = LINK.findall(text)
    assert len(links) > 5
    assert not [path for path, _ in links if path and not (FOLDER / path).exists()]
    assert not [anchor for path, anchor in links if not path and anchor not in headings]
