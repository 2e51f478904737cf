"""docs/compatibility.md has the rows of the tables of private names."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def compatibility():
    spec = importlib.util.spec_from_file_location("compatibility", DOCS / "compatibility.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_as_the_tables_say(compatibility):
    text = compatibility.PAGE.read_text()
    assert text == compatibility.page(text), "python docs/compatibility.py --write"
    assert "`torch.Tensor._make_wrapper_subclass` | makes a tensor without memory" in text
    assert "`jax._src.distributed.global_state` | has the client" in text


def test_another_page_is_noticed_and_mended(compatibility, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{compatibility.BEGIN}\n| gone |\n{compatibility.END}\nafter\n")
    monkeypatch.setattr(compatibility, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["compatibility.py"])
    assert compatibility.main() == 1
    assert "is not as the tables say" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["compatibility.py", "--write"])
    assert compatibility.main() == 0
    assert "| gone |" not in page.read_text() and page.read_text().endswith("\nafter\n")
    monkeypatch.setattr("sys.argv", ["compatibility.py"])
    assert compatibility.main() == 0
