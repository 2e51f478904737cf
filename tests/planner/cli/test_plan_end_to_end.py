"""`isoshard plan` from a script, or a configuration, to a report: nothing is put in its place."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import transformers

from isoshard.cli import main
from isoshard.planner.reports.comparison import comparison_from_json
from isoshard.planner.reports.report import Report
from tests import fresh

MIB = 1 << 20
SCRIPT = """
import jax
import jax.numpy as jnp

def step(params, batch):
    def loss(params):
        hidden = jax.nn.relu(batch @ params["up"])
        return jnp.mean((hidden @ params["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

def make_args():
    up = jax.ShapeDtypeStruct((1024, 4096), "float32")
    down = jax.ShapeDtypeStruct((4096, 1024), "float32")
    return {"up": up, "down": down}, jax.ShapeDtypeStruct((512, 1024), "float32")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_steps.py").write_text(SCRIPT)
    return tmp_path


def run(*words):
    return main(["plan", *words, "--width", "100"])


def test_a_step_of_jax(folder, capsys):
    status = run(
        "planned_steps.py:step", "--args", "planned_steps.py:make_args", "--mesh", "v5e:4x4",
        "--plan", "data", "--plan", "fsdp", "--html", "plans.html", "--json", "plans.json",
    )  # fmt: skip
    assert status == 0
    both = comparison_from_json((folder / "plans.json").read_text()).reports
    data, fsdp = both["data"], both["fsdp"]
    assert (data.memory.parameters, fsdp.memory.parameters) == (32 * MIB, 2 * MIB)
    assert data.memory.inputs == fsdp.memory.inputs == 512 * 1024 * 4 // 16
    assert data.memory.capacity == 16_000_000_000 and data.fits
    assert {use.axes for use in data.collectives} == {("data",)}
    assert {use.kind for use in data.collectives} == {"all-reduce"}
    assert sum(use.bytes * use.count for use in data.collectives) >= 32 * MIB
    assert "all-gather" in {use.kind for use in fsdp.collectives}
    assert all(use.line.startswith("planned_steps.py:") for use in data.collectives)
    assert data.flops == pytest.approx(5 * 2 * 32 * 1024 * 4096, rel=0.2)
    assert capsys.readouterr().out.count("data") > 2
    assert (folder / "plans.html").read_text().count("<svg") > 8


def test_no_plan_fits(folder, capsys):
    status = run(
        "planned_steps.py:step", "--args", "planned_steps.py:make_args", "--mesh", "v5e:4x4",
        "--plan", "auto", "--memory", "100KB",
    )  # fmt: skip
    said = capsys.readouterr()
    assert status == 1
    assert said.err.startswith("isoshard plan: step: no plan fits in the 97.7 KiB of a device. Th")
    assert "too much" in said.err and "What would help: more devices (about " in said.err


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_command_that_is_ended_leaves_no_compiler(folder, sent, status):
    python, child = folder / "python", folder / "child"
    python.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys, time\n"
        "if sys.argv[1] == '-c':\n"
        '    print(\'{"jax": "0.10.2", "libtpu": "0.0.52", "flatbuffers": "25"}\')\n'
        "    sys.exit()\n"
        f"pathlib.Path({str(child)!r}).write_text(str(os.getpid()))\n"
        "while os.read(0, 1): pass\n"  # as the real one does: until nobody holds the other end
    )
    python.chmod(0o755)
    words = ("planned_steps.py:step", "--args", "planned_steps.py:make_args", "--mesh", "v5e:4x4")
    program, said = folder / "program.py", folder / "said"
    program.write_text("import sys\nfrom isoshard.cli import main\nsys.exit(main(sys.argv[1:]))")
    command = fresh.start(
        (program, "plan", *words, "--depth", "compile"),
        cwd=folder,
        env=os.environ | {"ISOSHARD_COMPILER_PYTHON": str(python)},
        output=os.devnull,
        errors=said,
    )
    try:
        assert within(120, lambda: child.exists() and child.read_text())
        os.kill(command.pid, sent)
        assert command.wait(60) == status
    finally:
        if command.poll() is None:
            os.kill(command.pid, signal.SIGKILL)
    text = said.read_text()
    assert "Traceback" not in text
    assert (text == "isoshard plan: interrupted\n") == (sent == signal.SIGINT)
    assert within(10, lambda: not Path(f"/proc/{child.read_text()}").exists())


def within(seconds, holds):
    """Whether something becomes true soon."""
    ends = time.monotonic() + seconds
    while not holds() and time.monotonic() < ends:
        time.sleep(0.05)
    return bool(holds())


def test_too_little_memory(folder, capsys):
    status = run(
        "planned_steps.py:step", "--args", "planned_steps.py:make_args", "--mesh", "v5e:4x4",
        "--plan", "data", "--memory", "40MiB",
    )  # fmt: skip
    said = capsys.readouterr()
    assert status == 1
    assert "isoshard plan: does not fit, by " in said.err
    assert "(Plan.fsdp('data')): saves 30.0 MiB a device at rest" in said.out.replace("\n  ", " ")


def test_a_model_of_transformers_by_its_configuration(folder, capsys):
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=512, intermediate_size=1024,
        num_hidden_layers=1, num_attention_heads=8, vocab_size=4000, dtype="bfloat16",
    ).to_json_file(folder / "config.json")  # fmt: skip
    status = run(
        "--hf", "config.json", "--mesh", "h100:2x8", "--plan", "fsdp,tensor", "--sequence", "128",
        "--json", "report.json",
    )  # fmt: skip
    assert status == 0
    report = Report.from_json((folder / "report.json").read_text())
    assert (report.step, report.framework) == ("LlamaForCausalLM", "torch")
    assert dict(report.mesh) == {"data": 2, "model": 8}
    assert report.memory.optimizer >= 2 * report.memory.parameters > 0
    assert {"data", "model"} <= {name for use in report.collectives for name in use.axes}
    assert any("modeling_llama.py" in use.line for use in report.collectives)
    assert "fsdp=data,tensor=model" in capsys.readouterr().out


def test_a_plan_that_is_found(folder, capsys):
    status = run(
        "planned_steps.py:step", "--args", "planned_steps.py:make_args", "--mesh", "v5e:4x4",
        "--plan", "auto", "--json", "report.json",
    )  # fmt: skip
    assert status == 0
    report = Report.from_json((folder / "report.json").read_text())
    assert report.fits and report.plan.startswith("Plan(")
    assert "choices in" in capsys.readouterr().out
