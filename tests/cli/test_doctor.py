"""`isoshard doctor` tells what is installed and what works, and survives what does not."""

import dataclasses
import importlib.metadata
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from isoshard.cli import doctor, main, packages, probes, survey
from isoshard.cli.doctor import Examination
from isoshard.cli.packages import EXTRAS, Package
from isoshard.cli.probes import FAILS, MISSING, PROBES, WORKS, Probe, Result, Unavailable
from isoshard.core.errors import PrivateNameError
from isoshard.core.installation import install_command
from isoshard.core.runtime import nvidia
from isoshard.core.runtime.private_names import TRIED
from isoshard.planner.programs import targets
from isoshard.planner.programs.targets import Planned

JAX, TORCH = Package("jax", "0.10.2", ">=0.9", None), Package("torch", None, ">=2.10", "torch")
WELL = [Result("devices", WORKS, "8 x cpu (cpu)"), Result("shard", WORKS, "8 blocks")]
BROKEN = Result("train", FAILS, "ImportError: no name\n  of this kind", "install another torch")


def shown(*args, width=100, **kwargs) -> str:
    console = Console(file=io.StringIO(), width=width)
    doctor.show(console, Examination(*args, **kwargs))
    return console.file.getvalue()


@pytest.fixture
def metadata(monkeypatch, tmp_path):
    """Put packages before those that are installed, as far as their metadata say."""

    def put(**versions):
        for name, version in versions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            if name == "jax":
                text += "Provides-Extra: cuda12\nProvides-Extra: cuda13\n"
            (folder / "METADATA").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return put


@pytest.fixture
def only_core(monkeypatch):
    """No package of an extra is installed."""
    core = ("isoshard", "jax", "jaxlib", "numpy", "rich")
    version = importlib.metadata.version

    def only(name):
        if name not in core:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(packages.importlib.metadata, "version", only)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Put an `nvidia-smi` on the path."""

    def put(text, status=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


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


HERE = (
    *("devices", "shard", "exchange", "train", "numbers", "function", "flax", "checkpoint"),
    "onnx",
)
"""The probes that need nothing but what is installed for the tests."""


def test_everything_works_here(monkeypatch, capsys):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # which compiles faster
    status = main(["doctor", "--json", "--devices", "2"])
    data = json.loads(capsys.readouterr().out)
    assert status == 0, data
    assert data["healthy"]
    checks = {check["name"]: check for check in data["checks"]}
    assert list(checks) == list(PROBES)
    assert [name for name, check in checks.items() if check["status"] == FAILS] == [], checks
    for name in HERE:
        assert (checks[name]["status"], checks[name]["fix"]) == (WORKS, ""), checks[name]
        assert checks[name]["detail"]
    assert checks["devices"]["facts"]["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 2}]
    versions = {package["name"]: package["version"] for package in data["packages"]}
    assert versions["jax"] == jax.__version__
    assert str(Path(__file__).resolve().parents[2]) in data["origin"]


def test_a_missing_module_is_named_with_the_command_that_gets_it(fake_probe, monkeypatch):
    fake_probe(lambda: "never", needs=("torch", "matplotlib"))
    monkeypatch.setattr(probes.importlib.util, "find_spec", lambda name: None)
    result = probes.run("shard")
    assert (result.status, result.detail) == (MISSING, "torch and matplotlib not installed")
    assert result.fix == install_command("demo", "torch")


def test_what_a_probe_raises_is_its_result(fake_probe):
    fake_probe(lambda: 1 // 0)
    result = probes.run("shard")
    assert (result.status, result.fix) == (FAILS, "the fix")
    assert result.detail == "ZeroDivisionError: integer division or modulo by zero"


@pytest.fixture
def cuda_target(monkeypatch):
    """What doctor says of compiling for GPUs, without a plugin."""
    monkeypatch.setattr(targets, "packages_of", lambda python: {"jax": jax.__version__})
    monkeypatch.setattr(nvidia, "cuda_plugins", dict)
    return lambda: next(target for target in targets.planned() if target.machine == "cuda")


def test_a_driver_without_the_plugin_is_told_with_the_extra_that_fits_it(
    driver, metadata, cuda_target
):
    driver("| Driver Version: 550.54.15   CUDA Version: 12.4  |")
    metadata(jax=jax.__version__)
    result = probes.run("accelerator")
    assert result.status == MISSING
    assert result.detail == (
        "NVIDIA driver for CUDA 12.4 found, but JAX's CUDA plugin is not installed"
    )
    assert result.fix == cuda_target().fix == f'pip install "jax[cuda12]=={jax.__version__}"'


def test_without_a_driver_there_is_no_accelerator_and_the_same_extra(
    monkeypatch, metadata, cuda_target
):
    metadata(jax=jax.__version__)
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    result = probes.run("accelerator")
    assert (result.status, result.detail.split()[0]) == (MISSING, "none")
    assert result.fix == cuda_target().fix == f'pip install "jax[cuda13]=={jax.__version__}"'


@pytest.mark.parametrize(("platforms", "status"), [("cpu", MISSING), (None, FAILS)])
def test_a_plugin_without_effect_is_broken_unless_the_cpu_is_asked_for(
    driver, metadata, monkeypatch, platforms, status
):
    driver("CUDA Version: 13.0")
    metadata(jax="0.10.2", jax_cuda13_plugin="0.9.1")
    monkeypatch.setitem(TRIED, "jax", "0.9.0 to 0.10.2")
    config = SimpleNamespace(jax_platforms=platforms)
    fake = SimpleNamespace(config=config, default_backend=lambda: "cpu", __version__="0.10.2")
    monkeypatch.setattr(probes, "jax", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = probes.run("accelerator")
    assert result.status == status
    if status == FAILS:
        assert "jax-cuda13-plugin 0.9.1 installed, but JAX 0.10.2 sees no GPU" in result.detail
        assert "jax.devices('cuda')" in result.fix
    else:
        assert result.detail.endswith("but this process is set to use the CPU")
        assert result.fix == ""  # it is installed


def test_a_plugin_without_a_driver_is_not_advised_again(monkeypatch, metadata):
    """It compiles for GPUs that are not attached."""
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    metadata(jax=jax.__version__, jax_cuda13_plugin=jax.__version__)
    result = probes.run("accelerator")
    assert (result.status, result.fix) == (MISSING, "")


@pytest.fixture
def tried(monkeypatch):
    """The versions in this environment count as tried."""
    monkeypatch.setitem(TRIED, "jax", "0.9.0 to 0.99")
    monkeypatch.setitem(TRIED, "torch", "2.10 to 2.99")


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'jax.gone'"), PrivateNameError("jax has no x")]
)
def test_a_bridge_that_cannot_be_imported_names_the_versions(tried, monkeypatch, error):
    def fail():
        raise error

    exchange = dataclasses.replace(PROBES["exchange"], run=fail)
    monkeypatch.setitem(PROBES, "exchange", exchange)
    result = probes.run("exchange")
    assert result.status == FAILS
    torch = importlib.metadata.version("torch")
    assert result.fix == (
        "isoshard was tried with jax 0.9.0 to 0.99 and torch 2.10 to 2.99 (installed: "
        f"jax {jax.__version__} and torch {torch}): reinstall what cannot be imported"
    )


def test_a_newer_jax_is_named_whatever_fails(tried, metadata):
    metadata(jax="1.0.1")
    fix = probes.advice("flax", RecursionError("maximum recursion depth exceeded"))
    assert "(installed: jax 1.0.1)" in fix and "torch" not in fix
    assert fix.endswith(': pip install "jax>=0.9.0,<0.100"')


def test_the_versions_that_were_tried_are_those_of_the_private_names():
    from isoshard.core.runtime import _jax_internals
    from isoshard.torch_bridge import _torch_internals

    assert _jax_internals.NAMES.versions == TRIED["jax"]
    assert _torch_internals.NAMES.versions == TRIED["torch"]


def test_torch_tpu_without_libtpu_is_named(metadata, monkeypatch):
    assert packages.torch_tpu_warning() == ""
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    metadata(torch_tpu="0.2.0")
    warning = packages.torch_tpu_warning()
    assert (
        "a bare `import torch` ends the process unless TORCH_DEVICE_BACKEND_AUTOLOAD=0" in warning
    )
    assert warning.endswith("which is not so here")
    assert shown([JAX], WELL, warning=warning).count("torch_tpu") == 1
    assert probes.advice("train") == warning  # its process ended
    assert shown([JAX], [*WELL, dataclasses.replace(BROKEN, fix=warning)], warning=warning).count(
        "torch_tpu"
    ) == 1  # fmt: skip
    assert probes.advice("shard") != warning
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert packages.torch_tpu_warning().endswith("which is so here")


def test_torch_tpu_beside_a_tpu_wants_the_same_slot(metadata):
    metadata(torch_tpu="0.2.0", libtpu="0.0.52")
    assert "both want torch's PrivateUse1 slot" in packages.torch_tpu_warning()


def test_a_probe_that_hangs_is_given_up(fake_python):
    fake_python("exec sleep 60")
    (result,) = survey.survey(["shard"], timeout=0.2)
    assert (result.status, result.detail) == (FAILS, "no answer within 0.2 s")


def test_a_probe_that_kills_its_process_is_reported_and_the_rest_goes_on(fake_python):
    fake_python("echo noise; echo 'terminate called' >&2; kill -ABRT $$")
    results = list(survey.survey(["shard", "train"], timeout=30))
    assert [result.name for result in results] == ["shard", "train"]
    assert results[0].detail == "the process ended (killed by SIGABRT): terminate called"


def test_the_probe_that_ended_the_process_is_the_one_that_is_named(monkeypatch):
    """Also where others worked before it, in the same process and in the one after it."""
    deadly = "train"
    names = ["shard", "train", "numbers", "function"]
    program = (
        "import json, os, sys\n"
        "for name in sys.argv[6:]:\n"
        f"    if name == {deadly!r}: os._exit(3)\n"
        "    print('isoshard-probe ' + json.dumps({'name': name, 'status': 'works', 'detail': ''}),"
        " flush=True)\n"
    )
    popen = subprocess.Popen

    def start(command, **options):
        return popen([command[0], "-c", program, *command], **options)

    monkeypatch.setattr(survey.subprocess, "Popen", start)
    results = list(survey.survey(names, timeout=30))
    assert [result.name for result in results] == names
    assert [result.name for result in results if result.status == FAILS] == [deadly]


def test_packages_are_those_of_users():
    listed = {package.name: package for package in packages.packages()}
    assert list(listed)[:6] == ["isoshard", "python", "jax", "jaxlib", "numpy", "rich"]
    assert not {"pytest", "sphinx", "nbclient", "dm-haiku", "diffrax"} & set(listed)
    assert (listed["torch"].needs, listed["torch"].extra) == (">=2.10", "torch")
    assert listed["tensorstore"].extra == "checkpoint"
    assert (listed["onnx"].needs, listed["onnx"].extra) == (">=1.18", "onnx")
    assert listed["onnxscript"].extra == "onnx-torch"
    assert listed["jax"].extra is None
    assert packages.missing_extras() == []


def test_what_is_not_installed_is_a_line_of_extras(only_core):
    listed, extras = packages.packages(), packages.missing_extras()
    assert [package.name for package in listed][2:] == ["jax", "jaxlib", "numpy", "rich"]
    assert extras == list(EXTRAS)
    missing = Result("train", MISSING, "torch not installed", install_command("torch"))
    text = shown(listed, [*WELL, missing], extras=extras)
    assert "Extras to add: torch (PyTorch on the mesh), flax" in text
    assert text.count(install_command("torch")) == 1  # brackets survive, told once
    assert "not installed" not in text
    assert "isoshard works on this machine." in text


@pytest.mark.parametrize(("package", "problem", "fix"), [
    (JAX, "", ""),
    (TORCH, "not installed", install_command("torch")),
    (Package("torch", "2.9.1", ">=2.10", "torch"), "2.9.1 is too old", "torch>=2.10"),
    (Package("torch", "2.13.0+cpu", ">=2.10", "torch"), "", ""),
    (Package("jax", "0.12.0.1", "<0.11,>=0.9", None), "0.12.0.1 is too new", "jax<0.11,>=0.9"),
    (Package("jax", "0.10.9", "<0.11,>=0.9", None), "", ""),
    (Package("numpy", "2.0", ">=2.0.0", None), "", ""),
    (Package("python", "3.10.1", ">=3.11", None), "3.10.1 is too old", "use Python >=3.11"),
    (Package("rich", None, ">=13", None), "not installed", install_command()),
])  # fmt: skip
def test_a_package_has_a_problem_or_none(package, problem, fix):
    assert package.problem == problem
    assert fix in package.fix
    assert bool(package.fix) == bool(problem)


@pytest.mark.parametrize(("name", "version", "untried"), [
    ("jax", "0.10.2", False),
    ("jax", "0.10.3", True),
    ("torch", "2.15.1+cpu", False),
    ("flax", "99", False),
])  # fmt: skip
def test_a_version_newer_than_was_tried_is_no_fault(name, version, untried, monkeypatch):
    monkeypatch.setitem(TRIED, "jax", "0.9.0 to 0.10.2")
    monkeypatch.setitem(TRIED, "torch", "2.10 to 2.15")
    package = Package(name, version, ">=0.1", None)
    assert bool(package.untried) == untried
    text = shown([package], WELL, width=120)
    assert ("newer than isoshard has been tried with" in text) == untried
    assert "isoshard works on this machine." in text


@pytest.mark.parametrize("requirement", ["!!", "jax~=0.9", 'jax>=0.9; python_version > "3"'])
def test_a_requirement_it_cannot_read_is_an_error(requirement):
    with pytest.raises(ValueError, match="requirement doctor cannot read: "):
        packages._parsed(requirement)


def test_what_does_not_work_is_the_end():
    old = Package("torch", "2.9.1", ">=2.10", "torch")
    text = shown([JAX, old], [*WELL, BROKEN], width=80)
    assert text.splitlines()[-3:] == [
        "What does not work:",
        "  torch: 2.9.1 is too old; isoshard takes >=2.10",
        "  train torch on the mesh: ImportError: no name of this kind",
    ]
    assert "✗" in text and "install another torch" in text and 'pip install "torch>=2.10"' in text
    assert "works on this machine" not in text


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [("plot", WORKS, 0), ("plot", MISSING, 0), ("plot", FAILS, 1), ("shard", FAILS, 1)],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_exit_status_is_1_if_a_probe_fails(monkeypatch, capsys, name, status, code, options):
    results = [WELL[0], Result(name, status, "seen")]
    monkeypatch.setattr(doctor, "packages", lambda: [Package("isoshard", "0.1.0", "", None), JAX])
    monkeypatch.setattr(doctor, "survey", lambda *_, **__: iter(results))
    assert main(["doctor", *options]) == code
    printed = capsys.readouterr().out
    if options:
        data = json.loads(printed)
        assert data["healthy"] == (code == 0) == (not data["faults"])
    else:
        assert printed.rstrip().endswith("isoshard works on this machine.") == (code == 0)


def test_the_exit_status_is_1_if_a_package_is_too_old(monkeypatch, capsys, metadata):
    monkeypatch.setattr(doctor, "survey", lambda *_, **__: iter(WELL))
    metadata(optax="0.1")
    assert main(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["healthy"]
    assert {"title": "optax", "reason": "0.1 is too old; isoshard takes >=0.2.5"} in data["faults"]


@pytest.mark.parametrize("count", ["0", "two"])
def test_a_wrong_device_count_is_refused(capsys, count):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", f"--devices={count}"])
    assert f"needs a count of devices, 1 or more, not '{count}'" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "unbuffered"), [(["-h"], "1"), (["plan", "--list"], "")])
def test_a_reader_that_stops_early_is_no_error(words, unbuffered):
    """As in `isoshard -h | head -3`."""
    with subprocess.Popen(
        [sys.executable, "-m", "isoshard", *words],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert (process.wait(timeout=120), errors) == (141, "")


@pytest.mark.parametrize(("words", "missing", "extra"), [
    (["demo"], "torch.nn", "demo"),
    (["run-torch-xla", "script.py"], "torch", "torch"),
    (["onnx", "check", "x"], "onnx", "onnx"),
])  # fmt: skip
def test_a_command_whose_dependency_is_missing_says_so(monkeypatch, capsys, words, missing, extra):
    def absent(name):
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr("isoshard.cli.dispatch.importlib.import_module", absent)
    assert main(words) == 2
    needs = f"isoshard {words[0]} needs {missing.partition('.')[0]}, which is not installed. Fix: "
    assert needs + install_command(extra) in capsys.readouterr().err


def test_a_pipe_other_than_standard_output_is_an_error(monkeypatch):
    def fail(argv):
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr(doctor, "main", fail)
    with open(os.devnull, "w") as stdout:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError, match="of a socket"):
            main(["doctor"])


def test_what_can_be_planned_is_shown_with_what_is_missing():
    rows = [
        Planned("tpu", "compile for TPU", {"libtpu": "0.0.52"}, "", "pip install libtpu"),
        Planned("cuda", "compile for GPU", {}, "the plugin is not installed", "pip install it"),
    ]
    text = shown([JAX], WELL, rows)
    assert "What can be planned" in text and "libtpu 0.0.52" in text
    assert "the plugin is not installed" in text and "compile for GPU: pip install it" in text
    assert Examination([JAX], WELL, rows).report()["planning"][1]["machine"] == "cuda"


def test_another_failure_of_the_exchange_keeps_its_own_advice(tried):
    assert "the same kind of device" in probes.advice("exchange", RuntimeError("copies"))


def test_a_child_that_cannot_start_says_why(fake_python):
    fake_python("echo 'No module named jax' >&2; exit 1")
    (result,) = survey.survey(["devices"], timeout=30)
    assert result.detail == "the process ended (exit status 1): No module named jax"


def test_an_extra_is_missing_where_one_that_it_needs_is(only_core, monkeypatch):
    installed = packages.importlib.metadata.version
    monkeypatch.setattr(
        packages.importlib.metadata,
        "version",
        lambda name: "1" if name in ("matplotlib", "flax", "optax") else installed(name),
    )
    missing = packages.missing_extras()
    assert "flax" not in missing and "demo" in missing  # demo needs torch


def test_what_is_missing_is_no_fault():
    none = Result("accelerator", MISSING, "none seen by JAX", "pip install cuda")
    text = shown([JAX], [*WELL, none])
    assert text.splitlines()[-1] == "isoshard works on this machine."
    assert "use an accelerator: pip install cuda" in text


def test_what_is_not_on_this_machine_is_missing_and_not_broken(fake_probe):
    def look():
        raise Unavailable("no such device")

    fake_probe(look)
    assert probes.run("shard").status == MISSING


def test_it_says_where_isoshard_came_from():
    isoshard = Package("isoshard", "0.1.0", "", None)
    text = shown([isoshard, JAX], WELL, origin="a package index")
    assert text.startswith("isoshard 0.1.0, from a package index\n")
