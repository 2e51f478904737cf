"""The benchmark of exported models, on a small scale."""

from rich.console import Console

import isoshard as iso
from benchmarks import onnx_run
from benchmarks.models import sizes


def test_the_contestants_compute_the_same_with_the_same_collectives():
    mesh = iso.make_mesh((2, 4), ("data", "model"))
    found = onnx_run.measure(sizes.problem("gpt2", "quick"), mesh, rounds=1)
    rows = found["contestants"]
    assert list(rows) == ["pure JAX", "isoshard, opset 20", "isoshard, opset 23", "ONNX Runtime"]
    assert all(row["ratio"] > 0 for row in rows.values())
    talk = [row["collectives"] for row in rows.values() if "collectives" in row]
    assert talk == [{"all-reduce": talk[0]["all-reduce"]}] * 3
    console = Console(width=110, record=True)
    console.print(onnx_run.table("gpt2", found))
    assert "5 all-reduce" in console.export_text()
