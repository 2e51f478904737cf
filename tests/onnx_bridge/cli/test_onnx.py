"""`isoshard onnx check` and `show`."""

import json

import onnx
import pytest

from isoshard.cli import main
from isoshard.onnx_bridge.cli.onnx_drawing import draw
from tests.onnx_bridge.checking import broken


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save the sound model, changed by some functions, as model.onnx."""
    monkeypatch.chdir(tmp_path)

    def save(*changes):
        model = broken.sound()
        for change in changes:
            change(model)
        onnx.save(model, "model.onnx")

    return save


class TestCheck:
    def test_a_sound_model(self, saved, capsys):
        saved()
        assert main(["onnx", "check", "model.onnx"]) == 0
        said = capsys.readouterr().out
        assert said == "model.onnx: 0 errors, 0 warnings, 0 for information\n"

    def test_faults(self, saved, capsys):
        saved(broken.broken("structure.axis-range"), broken.broken("structure.axis-order"))
        assert main(["onnx", "check", "model.onnx"]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "error   structure.axis-range: node 'up', tensor 'w', axis 7: the tensor has axes "
            "-2 to 1",
            "model.onnx: 1 error, 0 warnings, 0 for information",
        ]

    def test_information_on_request(self, saved, capsys):
        saved(broken.broken("structure.devices-implied"))
        assert main(["onnx", "check", "model.onnx"]) == 0
        assert capsys.readouterr().out.endswith("1 for information (--all shows it)\n")
        main(["onnx", "check", "--all", "model.onnx"])
        assert capsys.readouterr().out.startswith("info    structure.devices-implied: node 'up'")

    def test_for_programs(self, saved, capsys):
        saved(broken.broken("structure.dim-value"))
        assert main(["onnx", "check", "model.onnx", "--json", "--config", "tp"]) == 1
        (finding,) = json.loads(capsys.readouterr().out)
        assert finding == {
            "rule": "structure.dim-value",
            "severity": "error",
            "message": "dim_value says 10, and the tensor's size there is 16",
            "node": "up",
            "tensor": "w",
            "axis": 1,
            "configuration": "tp",
        }

    @pytest.mark.parametrize(("words", "why"), [
        (["check", "none.onnx"], "isoshard onnx check: none.onnx: not a model that can be read"),
        (["show", "none.onnx"], "No such file"),
        (["check", "model.onnx", "--config", "pp"], "no configuration 'pp'; it has 'tp'"),
        (["show", "model.onnx", "--config", "pp"], "no configuration 'pp'; there is 'tp'"),
    ])  # fmt: skip
    def test_what_cannot_be_read(self, saved, capsys, words, why):
        saved()
        assert main(["onnx", *words]) == 2
        assert why in capsys.readouterr().err


PICTURE = """\
stage 0: 1 node (MatMul) on 2 devices

            device 0   device 1
          ┌──────────┬──────────┐
   inputs │  384 B   │  384 B   │
          ├──────────┼──────────┤
   values │  128 B   │  128 B   │
          └──────────┴──────────┘

      0        1
  ┌────────┬────────┐
x │  all   │  all   │
  ├────────┼────────┤
w │ :, 1/2 │ :, 2/2 │
  ├────────┼────────┤
y │ :, 1/2 │ :, 2/2 │
  └────────┴────────┘

tensor  kind   shape  dtype    blocks  copies  bytes/device  from
x       input  4x8    float32  whole   2              128 B  no spec
w       input  8x16   float32  1x2     1              256 B  spec
y       value  4x16   float32  1x2     1              128 B  spec
"""


class TestShow:
    def test_the_picture(self, saved, capsys):
        saved()
        assert main(["onnx", "show", "model.onnx", "--width", "80"]) == 0
        assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
            line.strip() for line in PICTURE.splitlines()
        ]

    def test_a_size_for_a_symbol(self, saved, capsys):
        def symbolic(model):
            model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
            model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"

        saved(symbolic)
        main(["onnx", "show", "model.onnx", "--width", "80"])
        unknown = capsys.readouterr().out
        assert "256 B + ?" in unknown
        main(["onnx", "show", "model.onnx", "--width", "80", "--size", "n=4"])
        known = capsys.readouterr().out
        assert "384 B" in known
        assert "?" not in known
        with pytest.raises(SystemExit):
            main(["onnx", "show", "model.onnx", "--size", "n"])
        assert "'n': write a name and a number, as in batch=8" in capsys.readouterr().err

    def test_each_block_has_its_colour(self):
        colors = {line for line in draw(broken.sound(), color=True).split("\x1b[") if "1/2" in line}
        assert len(colors) == 1
        assert colors != {
            line for line in draw(broken.sound(), color=True).split("\x1b[") if "2/2" in line
        }

    def test_more_devices_than_columns(self):
        model = broken.sound()
        model.configuration[0].num_devices = 512
        for spec in broken.entry(model).sharding_spec:
            del spec.sharded_dim[:]
            spec.device[:] = [-1]
            broken.group(spec, -1, list(range(512)))
        lines = draw(model, width=80).splitlines()
        assert max(map(len, lines)) <= 80
        assert "on 512 devices" in lines[0]
        assert "device 511" in lines[2]
