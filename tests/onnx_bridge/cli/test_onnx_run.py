"""`isoshard onnx run`: in this process on its devices, and in a new one on virtual ones."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import isoshard as iso
from isoshard import P
from isoshard.cli import main
from isoshard.onnx_bridge import annotate

WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def folder(tmp_path):
    """A product, its contraction split, with inputs for it."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 8]) for n in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        values[:1],
        values[1:],
        [onnx.numpy_helper.from_array(WEIGHT, "w")],
    )
    opsets = [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, ir_version=11, opset_imports=opsets)
    mesh = iso.make_mesh((8,), ("tp",))
    specs = {"x": P(None, "tp"), "w": P("tp"), "y": P()}
    onnx.save_model(annotate(model, mesh, specs), tmp_path / "model.onnx")
    np.savez(tmp_path / "in.npz", x=np.ones((2, 8), np.float32))
    return tmp_path


def run(folder, *words, inputs="in.npz"):
    return main(["onnx", "run", str(folder / "model.onnx"), str(folder / inputs), *map(str, words)])


def test_outputs_are_told_and_saved(folder, capsys):
    assert run(folder, "--collectives", "--out", folder / "out.npz") == 0
    told = capsys.readouterr().out
    assert "y: float32 (2, 8), P() on devices 0-7\nstage 0: 1 all-reduce\nwrote " in told
    np.testing.assert_array_equal(np.load(folder / "out.npz")["y"], [WEIGHT.sum(0)] * 2)


@pytest.mark.parametrize(("arrays", "told"), [
    ({"x": np.ones((2, 8))}, "x is float64, not float32"),
    ({"q": np.ones(2)}, "there is no input 'q'"),
])  # fmt: skip
def test_inputs_that_do_not_fit(folder, arrays, told, capsys):
    np.savez(folder / "wrong.npz", **arrays)
    assert run(folder, inputs="wrong.npz") == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "told"),
    [(b"no archive", "wrong.npz: "), (None, "No such file"), ("one", "one array without a name")],
)
def test_inputs_that_cannot_be_read(folder, data, told, capsys):
    if data == "one":
        with (folder / "wrong.npz").open("wb") as file:
            np.save(file, WEIGHT)
    elif data is not None:
        (folder / "wrong.npz").write_bytes(data)
    assert run(folder, inputs="wrong.npz") == 2
    assert told in capsys.readouterr().err
