"""What can be planned here, and what compilers are told of machines."""

from __future__ import annotations

import sys

import pytest

from isoshard.core.errors import ShardingError
from isoshard.core.runtime.nvidia import install_cuda
from isoshard.planner.machine.chips import chip
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs import targets
from isoshard.planner.programs.targets import (
    GPUS,
    CompilerMissingError,
    PlanningError,
    check,
    planned,
    target_config,
    target_of,
)


def told(text, shape):
    machine = topology(text)
    names = ("a", "b", "c")[: len(shape)]
    return target_of(machine.mesh(shape, names), machine)


@pytest.mark.parametrize(
    ("text", "shape", "machine", "name", "slices"),
    [
        ("v5e:4x4", (4, 4), "tpu", "v5e:4x4", 1),
        ("v4:2x2x4", (16,), "tpu", "v4:2x2x4", 1),
        ("v5p:16x16x16", (256, 16), "tpu", "v5p:16x16x16", 1),
        ("v6e:2*4x4", (2, 16), "tpu", "v6e:4x4", 2),
        ("h100:2x8", (2, 8), "cuda", "1x2x8", 1),
        ("b200:8", (8,), "cuda", "1x1x8", 1),
        ("h100:2x8", (4,), "cuda", "1x1x4", 1),
        ("cpu:64", (64,), "host", "", 1),
    ],
)
def test_a_machine_as_its_compiler_takes_it(text, shape, machine, name, slices):
    found = told(text, shape)
    assert (found.machine, found.topology, found.slices) == (machine, name, slices)


def test_a_mesh_of_a_block_is_given_a_machine_of_its_size():
    found = told("v5e:4x4", (2, 4))
    assert found.topology in ("v5e:2x4", "v5e:4x2") and len(found.device_coords) == 8
    machine = topology("v5e:4x4")
    whole = machine.mesh((16,), ("a",))
    corner = type(whole)(whole.devices[[0, 1, 5]], ("a",), axis_types=whole.axis_types)
    with pytest.raises(PlanningError, match="is not a full block of v5e:4x4"):
        target_of(corner, machine)


def test_gpus_are_those_of_the_chips():
    for name, facts in GPUS.items():
        assert facts.name == chip(name).kind
        assert facts.bandwidth == pytest.approx(chip(name).bandwidth, rel=0.05)
        text = target_config(name)
        assert f"core_count: {facts.cores}\n" in text and text.count("{") == text.count("}")
    with pytest.raises(ShardingError, match="for 'mi300' is not supported, only for a100, b200"):
        target_config("mi300")


@pytest.fixture
def installed(monkeypatch):
    def put(**versions):
        found = {name.replace("_", "-"): version for name, version in versions.items()}
        found.setdefault("flatbuffers", "25")
        monkeypatch.setattr(targets, "packages_of", lambda python: found)

    return put


def test_what_is_there_and_what_is_not(installed):
    installed(jax="0.10.2", jaxlib="0.10.2", libtpu="0.0.52")
    host, tpu, cuda = planned()
    assert (host.problem, tpu.problem) == ("", "") and tpu.versions["libtpu"] == "0.0.52"
    assert "jax-cuda12-plugin or jax-cuda13-plugin is not installed" in cuda.problem
    assert (host.fix, tpu.fix) == ("", "") and cuda.fix == install_cuda("0.10.2")


def test_what_writes_programs_is_missing(installed):
    """`jax.export` wants it, and jax does not install it."""
    installed(jax="0.10.2", jaxlib="0.10.2", flatbuffers="")
    host, tpu, _ = planned()
    assert (host.problem, host.fix) == ("flatbuffers is not installed", "pip install flatbuffers")
    assert tpu.fix == "pip install libtpu"
    with pytest.raises(CompilerMissingError, match="flatbuffers is not installed"):
        check("host")


def test_a_plugin_of_another_jax_does_not_do(installed):
    installed(jax="0.10.2", jaxlib="0.10.2", jax_cuda12_plugin="0.9.1")
    with pytest.raises(CompilerMissingError, match=r"0\.9\.1 does not fit jax 0\.10\.2"):
        check("cuda")
    installed(jax="0.10.2", jaxlib="0.10.2", jax_cuda13_plugin="0.10.2")
    assert check("cuda")["jax-cuda13-plugin"] == "0.10.2"


def test_what_is_installed_meanwhile_is_found(monkeypatch, tmp_path):
    assert targets.packages_of(sys.executable)["libtpu"] != "99"
    folder = tmp_path / "libtpu-99.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 99\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert targets.packages_of(sys.executable)["libtpu"] == "99"


def test_another_interpreter(monkeypatch, tmp_path):
    monkeypatch.setenv("ISOSHARD_COMPILER_PYTHON", str(tmp_path / "none"))
    assert targets.compiler_python() == str(tmp_path / "none")
    assert targets.compiler_python("mine") == "mine"
    for machine in ("host", "tpu"):
        with pytest.raises(
            CompilerMissingError, match=r"(?m)none does not run as a Python .*unset it$"
        ):
            check(machine)
    assert all("does not run" in row.problem for row in planned())
    monkeypatch.delenv("ISOSHARD_COMPILER_PYTHON")
    assert targets.compiler_python() == sys.executable
