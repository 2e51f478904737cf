"""docs/training.svg shows what benchmarks/results/training.json has."""

import copy
import re
from pathlib import Path
from xml.etree import ElementTree

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


def test_every_way_has_a_dot_or_fails():
    kept = results.saved("training")
    drawn = training_figure.draw(kept)
    ElementTree.fromstring(drawn)
    whole = len(training_figure.MODELS) * len(training_figure.WAYS)
    assert len(re.findall("<circle", drawn)) + drawn.count(">fails<") == whole
    less = copy.deepcopy(kept)
    del less["mlp"]["peers"]["torchax, jitted"]
    assert training_figure.draw(less).count(">fails<") == drawn.count(">fails<") + 1
