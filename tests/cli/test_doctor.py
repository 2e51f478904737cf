"""`isoshard doctor` tells what is installed and what works, and survives what does not."""

import io
import json
import subprocess
import sys

import jax
import pytest
from rich.console import Console

from isoshard.cli import doctor, main, probes, survey
from isoshard.cli.doctor import Package
from isoshard.cli.probes import FAILS, MISSING, PROBES, WORKS, Probe, Result, Unavailable
from isoshard.core.planner.programs.targets import Planned

JAX, TORCH = Package("jax", "0.10.2", ">=0.9", None), Package("torch", None, ">=2.10", "torch")
WELL = [Result("devices", WORKS, "8 x cpu (cpu)"), Result("shard", WORKS, "8 blocks")]


def shown(found, results) -> str:
    console = Console(file=io.StringIO(), width=100)
    doctor.show(console, found, results)
    return console.file.getvalue()


@pytest.fixture
def fake_probe(monkeypatch):
    """Put a probe that runs the given function in the place of `shard`."""

    def put(run, needs=()):
        monkeypatch.setitem(PROBES, "shard", Probe("shard", needs, "the fix", run))

    return put


@pytest.fixture
def fake_python(monkeypatch, tmp_path):
    """Let a shell script stand where the child's interpreter does."""

    def put(script: str):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(survey.sys, "executable", str(path))

    return put


@pytest.mark.long
@pytest.mark.parametrize("command", [["-m", "isoshard", "doctor"]])
def test_everything_works_here(command):
    done = subprocess.run(
        [sys.executable, *command, "--json", "--devices", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    data = json.loads(done.stdout)
    assert done.returncode == 0, data
    assert data["healthy"]
    checks = {check["name"]: check for check in data["checks"]}
    assert list(checks) == list(PROBES)
    assert [name for name, check in checks.items() if check["status"] == FAILS] == [], checks
    assert checks["devices"]["facts"]["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 2}]
    versions = {package["name"]: package["version"] for package in data["packages"]}
    assert versions["jax"] == jax.__version__


@pytest.mark.parametrize(
    "name",
    ["devices", "shard", "exchange", "train", "numbers", "function", "flax", "checkpoint", "onnx"],
)
def test_a_probe_works_on_the_devices_of_this_process(name):
    result = probes.run(name)
    assert (result.status, result.fix) == (WORKS, ""), result.detail
    assert result.detail


def test_a_missing_module_is_named_with_the_command_that_gets_it(fake_probe, monkeypatch):
    fake_probe(lambda: "never", needs=("torch", "matplotlib"))
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda name: None)
    result = probes.run("shard")
    assert (result.status, result.detail) == (MISSING, "torch and matplotlib not installed")
    assert result.fix == 'pip install "isoshard[demo,torch]"'


def test_what_a_probe_raises_is_its_result(fake_probe):
    fake_probe(lambda: 1 // 0)
    result = probes.run("shard")
    assert (result.status, result.fix) == (FAILS, "the fix")
    assert result.detail == "ZeroDivisionError: integer division or modulo by zero"


def test_what_is_not_on_this_machine_is_missing_and_not_broken(fake_probe):
    def look():
        raise Unavailable("no such device")

    fake_probe(look)
    assert probes.run("shard").status == MISSING


def test_a_gpu_that_jax_does_not_see_is_pointed_out(monkeypatch):
    monkeypatch.setattr(probes.shutil, "which", lambda name: f"/usr/bin/{name}")
    result = probes.run("accelerator")
    assert "NVIDIA driver, but JAX is installed without CUDA" in result.detail
    assert 'pip install "jax[cuda13]"' in result.fix


def test_a_probe_that_hangs_is_given_up(fake_python):
    fake_python("exec sleep 60")
    (result,) = survey.survey(["shard"], timeout=0.2)
    assert (result.status, result.detail) == (FAILS, "no answer within 0.2 s")


def test_a_probe_that_kills_its_process_is_reported_and_the_rest_goes_on(fake_python):
    fake_python("echo noise; echo 'terminate called' >&2; kill -ABRT $$")
    results = list(survey.survey(["shard", "train"], timeout=30))
    assert [result.name for result in results] == ["shard", "train"]
    assert results[0].detail == "the process ended (killed by SIGABRT): terminate called"


def test_a_child_that_cannot_start_says_why(fake_python):
    fake_python("echo 'No module named jax' >&2; exit 1")
    (result,) = survey.survey(["devices"], timeout=30)
    assert result.detail == "the process ended (exit status 1): No module named jax"


def test_packages_come_from_the_metadata_without_the_tools_of_developers():
    found = {package.name: package for package in doctor.packages()}
    assert {"isoshard", "python", "jax", "jaxlib", "numpy", "rich", "torch", "flax"} <= set(found)
    assert "pytest" not in found
    assert (found["torch"].needs, found["torch"].extra) == (">=2.10", "torch")
    assert found["tensorstore"].extra == "checkpoint"
    assert (found["onnx"].needs, found["onnx"].extra) == (">=1.18", "onnx")
    assert found["onnxscript"].extra == "onnx-torch"
    assert found["jax"].extra is None


@pytest.mark.parametrize(
    ("package", "problem", "fix"),
    [
        (JAX, "", ""),
        (TORCH, "not installed", 'pip install "isoshard[torch]"'),
        (Package("torch", "2.9.1", ">=2.10", "torch"), "2.9.1 is too old", "torch>=2.10"),
        (Package("torch", "2.13.0+cpu", ">=2.10", "torch"), "", ""),
        (Package("torch", "2.14.0.dev20270101", ">=2.10", "torch"), "", ""),
        (Package("rich", None, ">=13", None), "not installed", "pip install isoshard"),
    ],
)
def test_a_package_has_a_problem_or_none(package, problem, fix):
    assert package.problem == problem
    assert fix in package.fix
    assert bool(package.fix) == bool(problem)


def test_a_requirement_it_cannot_read_is_an_error():
    with pytest.raises(ValueError, match="requirement doctor cannot read: !!"):
        doctor._package("!!")


def test_the_tables_show_problem_and_fix():
    missing = Result("train", MISSING, "torch not installed", 'pip install "isoshard[torch]"')
    text = shown([JAX, TORCH], [*WELL, missing])
    assert "not installed" in text
    assert text.count('pip install "isoshard[torch]"') == 1  # brackets survive, said once
    assert "isoshard works on this machine." in text


def test_a_broken_core_is_said_plainly():
    text = shown([JAX], [WELL[0], Result("shard", FAILS, "RuntimeError: no", "the fix")])
    assert "✗" in text
    assert "the fix" in text
    assert "cannot shard arrays on this machine" in text


@pytest.mark.parametrize(("status", "code"), [(WORKS, 0), (FAILS, 1)])
def test_the_exit_status_is_that_of_the_core(monkeypatch, capsys, status, code):
    results = [WELL[0], Result("shard", status, "seen"), Result("plot", FAILS, "no")]
    monkeypatch.setattr(doctor, "survey", lambda *_, **__: iter(results))
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["healthy"] == (code == 0)


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_a_wrong_device_count_is_refused(capsys, count):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", f"--devices={count}"])
    assert f"needs a count of devices, 1 or more, not '{count}'" in capsys.readouterr().err


def test_a_wrong_command_is_answered_with_the_right_one(capsys):
    assert main(["docter"]) == 2
    assert "no command 'docter', did you mean 'doctor'?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys, argv):
    assert main(argv) == 0
    assert "doctor" in capsys.readouterr().out


def test_a_command_whose_dependency_is_missing_says_so(monkeypatch, capsys):
    def absent(name):
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    monkeypatch.setattr("isoshard.cli.dispatch.importlib.import_module", absent)
    assert main(["demo"]) == 2
    message = capsys.readouterr().err
    assert "isoshard demo needs torch, which is not installed" in message
    assert 'pip install "isoshard[demo]"' in message


def test_what_can_be_planned_is_shown_with_what_is_missing():
    rows = [
        Planned("tpu", "compile for TPU", {"libtpu": "0.0.52"}, "", "pip install libtpu"),
        Planned("cuda", "compile for GPU", {}, "the plugin is not installed", "pip install it"),
    ]
    console = Console(file=io.StringIO(), width=100)
    doctor.show(console, [JAX], WELL, rows)
    text = console.file.getvalue()
    assert "What can be planned" in text and "libtpu 0.0.52" in text
    assert "the plugin is not installed" in text and "compile for GPU: pip install it" in text
    assert doctor.report([JAX], WELL, rows)["planning"][1]["machine"] == "cuda"
