"""StableHLO export: saved, loaded and run again with the numbers of the model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from isoshard.torch_xla_bridge.torch_xla import stablehlo
from isoshard.torch_xla_bridge.torch_xla.stablehlo import (
    StableHLOExportOptions,
    StableHLOGraphModule,
    VariableType,
    exported_program_to_stablehlo,
    save_as_stablehlo,
    save_torch_model_as_stablehlo,
)


class Model(torch.nn.Module):
    """Buffers of both kinds, constants in the code, integers, several results, an unused input."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)

    def forward(self, x, index, unused):
        h = (
            self.norm(self.linear(x))
            + torch.arange(3)
            + torch.tensor([1.0, 2.0, 3.0]) * self.hidden
        )
        shifted = torch.zeros(5, device=x.device).to(torch.float64) + index
        return {"h": torch.softmax(h, -1), "index": index + 1}, shifted


def arguments():
    return torch.randn(5, 4), torch.arange(5), torch.ones(2)


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model, args = Model().eval(), arguments()
    return model, args, torch.export.export(model, args)


def check(program, model, args):
    want, got = model(*args), program(*args)
    torch.testing.assert_close(got[0]["h"].cpu(), want[0]["h"].detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(got[0]["index"].cpu(), want[0]["index"])
    assert torch.equal(got[1].cpu(), want[1])
    assert (got[0]["index"].dtype, got[1].dtype) == (torch.int64, torch.float64)


def test_numbers_text_and_signatures(exported):
    model, args, program = exported
    module = exported_program_to_stablehlo(program)
    check(module, model, args)
    check(module, model, arguments())
    got = module(args[0].to("jax"), *args[1:])[0]["h"]  # tensors on the device give such
    assert got.device.type == "jax"
    torch.testing.assert_close(got.cpu(), model(*args)[0]["h"].detach())
    assert "stablehlo.dot_general" in module.get_stablehlo_text()
    assert module.get_stablehlo_text("forward") == module.get_stablehlo_text()
    assert module.get_stablehlo_bytecode("forward")[:4] == b"ML\xefR"
    meta = module._bundle.stablehlo_funcs[0].meta
    names = [one.name for one in meta.input_locations if one.type_ is VariableType.PARAMETER]
    assert sorted(names) == sorted(model.state_dict())
    assert len(module._bundle.additional_constants) == 2
    assert [one.position for one in meta.input_locations][-3:] == [0, 1, 2]
    assert [one.dtype for one in meta.output_signature] == ["float32", "int64", "float64"]


def test_saved_and_loaded(exported, tmp_path):
    model, args, program = exported
    save_as_stablehlo(program, tmp_path / "a")
    loaded = StableHLOGraphModule.load(tmp_path / "a")
    check(loaded, model, args)
    loaded.save(tmp_path / "b")
    check(StableHLOGraphModule.load(tmp_path / "b"), model, args)
    names = {str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert names == {
        *(f"data/{name}" for name in model.state_dict()),
        *(f"functions/forward.{kind}" for kind in ("meta", "bytecode", "mlir")),
        "constants/0",
        "constants/1",
    }
    meta = json.loads((tmp_path / "a" / "functions" / "forward.meta").read_text())
    assert meta["input_locations"][-1] == {"type_": "input_arg", "position": 2, "name": ""}


def test_another_process_runs_it(exported, tmp_path, processes):
    _, args, program = exported
    save_as_stablehlo(program, tmp_path)
    want = exported_program_to_stablehlo(program)(*args)[0]["h"]
    np.save(tmp_path / "x.npy", args[0].numpy())
    code = (
        "import numpy as np, torch\n"
        "from isoshard.torch_xla_bridge.torch_xla.stablehlo import StableHLOGraphModule\n"
        f"program = StableHLOGraphModule.load({str(tmp_path)!r})\n"
        f"x = torch.from_numpy(np.load({str(tmp_path / 'x.npy')!r}))\n"
        "print(program(x, torch.arange(5), torch.ones(2))[0]['h'].sum(0).tolist())\n"
    )
    done = processes.run("-c", code)
    np.testing.assert_allclose(json.loads(done.stdout), want.sum(0), rtol=1e-6)


def test_a_module_and_options(tmp_path):
    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    options = StableHLOExportOptions(include_human_readable_text=False, save_weights=False)
    save_torch_model_as_stablehlo(model, (x,), tmp_path, options)
    assert not (tmp_path / "data").exists()
    loaded = StableHLOGraphModule.load(tmp_path)
    assert loaded.get_stablehlo_text() is None
    with pytest.raises(KeyError, match=r"needs the weight weight, which was not exported"):
        loaded(x)
    program = torch.export.export(model, (x,))
    bare = exported_program_to_stablehlo(program, StableHLOExportOptions(export_weights=False))
    with pytest.raises(KeyError, match="needs the weight"):
        bare.evaluate("forward", (x,))


def test_other_dtypes(tmp_path):
    for dtype in (torch.bfloat16, torch.float64):
        model, x = torch.nn.Linear(3, 2).to(dtype), torch.ones(4, 3, dtype=dtype)
        save_torch_model_as_stablehlo(model, (x,), tmp_path / str(dtype))
        got = StableHLOGraphModule.load(tmp_path / str(dtype))(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got, model(x).detach(), rtol=1e-2, atol=1e-2)


def test_mistakes(exported, tmp_path):
    _, args, program = exported
    module = exported_program_to_stablehlo(program)
    with pytest.raises(ValueError, match="forward takes 3 arguments, and got 1"):
        module(args[0])
    with pytest.raises(ValueError, match=r"argument 0 .* of shape \(5, 4\) and float32, as it was"):
        module(args[0][:2], *args[1:])
    with pytest.raises(KeyError, match=r"no program 'backward'; there are \['forward'\]"):
        module.evaluate("backward", args)
    with pytest.raises(FileNotFoundError, match="has no program"):
        StableHLOGraphModule.load(tmp_path)

    class Named(torch.nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"takes keyword arguments \(scale\)"):
        exported_program_to_stablehlo(torch.export.export(Named(), (x,), {"scale": x}))
    dynamic = torch.export.export(
        torch.nn.ReLU(), (x,), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    with pytest.raises(ValueError, match="has dynamic shapes"):
        exported_program_to_stablehlo(dynamic)
    for options in (
        StableHLOExportOptions(export_node_metadata=True),
        StableHLOExportOptions(custom_ops_allowed_in_graph={"mine"}),
    ):
        with pytest.raises(ValueError, match="torch_xla's exporter alone"):
            exported_program_to_stablehlo(program, options)
    assert all(hasattr(stablehlo, name) for name in stablehlo.__all__)
