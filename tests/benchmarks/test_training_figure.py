"""docs/training.svg shows what benchmarks/results/training.json has."""

from pathlib import Path

from benchmarks import training_figure
from tools.harness import results

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_docs_show_what_is_kept():
    kept = results.saved("training")
    drawn = training_figure.draw(kept)
    assert (DOCS / "training.svg").read_text() == drawn
    assert "](training.svg)" in (DOCS / "benchmarks.md").read_text()
    ratio = kept["gpt2"]["peers"]["torch_xla, SPMD"]["ratio"]
    assert f">{ratio:.2f}</text>" in drawn
