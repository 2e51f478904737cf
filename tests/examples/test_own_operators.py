"""docs/own_operators.md and examples/own_operators.py do what they say."""

import re
import runpy
from pathlib import Path

import jax
import numpy as np

import isoshard as iso
from isoshard import P

ROOT = Path(__file__).resolve().parents[2]


def test_the_tutorial():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own_operators.md").read_text(), re.S)
    assert len(blocks) == 6
    names = {}
    exec("\n".join(blocks[number] for number in (0, 3, 4)), names)  # test_doc_blocks.py runs all

    # What is said of the ring: nothing but its blocks is sent, three times.
    mesh, spec = names["mesh"], P("x")
    knn = jax.jit(lambda x, y: names["routed"].over(mesh, spec, spec)(x, y, 3))
    x, y = (iso.shard(np.zeros((n, 3), np.float32), mesh, spec) for n in (32, 8))
    text = knn.lower(x, y).compile().as_text()
    sent = re.findall(r"= (\S+) collective-permute\(", text)
    assert {shape.split("{")[0] for shape in sent} == {"f32[8,3]", "pred[8]"}
    assert len(sent) == 4  # the first turn, and the body of the loop for the other two
    for word in ("all-gather", "all-reduce", "all-to-all"):
        assert f" {word}(" not in text


def test_the_example(capsys):
    runpy.run_path(str(ROOT / "examples/own_operators.py"))
    lines = capsys.readouterr().out.splitlines()
    same = [line.split(":")[0] for line in lines if "equal to one device True" in line]
    assert same == [
        f"{where}, {how} shards" for where in ("JAX", "torch") for how in ("equal", "unequal")
    ]
    one, ring = map(int, re.findall(r"(\d+) MiB", "".join(lines)))
    assert ring * 8 < one
    assert "gradient in blocks ((200, 800, 500, 0, 1000, 500, 600, 400), None)" in lines[-1]
