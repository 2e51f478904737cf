"""The NVIDIA driver of this machine, and the extra of JAX for it."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from isoshard.core.runtime import nvidia
from isoshard.core.runtime.nvidia import cuda_extra, cuda_plugins, driver_cuda, install_cuda

HEADER = "| NVIDIA-SMI {0}.54.15    Driver Version: {0}.54.15    CUDA Version: {1}     |"


@pytest.fixture
def smi(monkeypatch, tmp_path):
    def put(text, status=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


@pytest.mark.parametrize(
    ("text", "status", "version"),
    [
        (HEADER.format(550, "12.4"), 0, "12.4"),
        (HEADER.format(580, "13.0"), 0, "13.0"),
        (HEADER.format(580, "N/A"), 0, ""),
        ("NVIDIA-SMI has failed because it could not communicate with the driver", 9, None),
    ],
)
def test_what_the_driver_runs(smi, text, status, version):
    smi(text, status)
    assert driver_cuda() == version


def test_no_driver_or_a_program_that_cannot_run(smi, tmp_path, monkeypatch):
    smi("")
    (tmp_path / "nvidia-smi").write_text("\0")
    assert driver_cuda() is None
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    assert driver_cuda() is None


def test_the_extra_fits_the_driver():
    both = [12, 13]
    for offered, installed, driver, extra in (
        (both, [], None, "cuda13"),
        (both, [], "", "cuda13"),
        (both, [], "12.9", "cuda12"),
        (both, [], "13.0", "cuda13"),
        (both, [], "14.0", "cuda13"),
        (both, [12], "13.0", "cuda12"),
        (both, [13], "12.4", "cuda12"),
        (both, [], "11.8", "cuda12"),
        ([12], [], None, "cuda12"),
        ([], [], "12.4", "cuda"),
    ):
        assert cuda_extra(offered, installed, driver) == extra, (offered, installed, driver)


def test_jax_itself_offers_it(monkeypatch):
    """Of the jax that is installed here."""
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    version = importlib.metadata.version("jax")
    extra = install_cuda().removeprefix('pip install "jax[').removesuffix(f']=={version}"')
    assert extra in importlib.metadata.metadata("jax").get_all("Provides-Extra")
    assert install_cuda("0.9.1") == f'pip install "jax[{extra}]==0.9.1"'


def test_a_driver_that_is_too_old_is_named(smi):
    smi(HEADER.format(470, "11.4"))
    assert install_cuda().endswith('" and update the NVIDIA driver, which runs CUDA 11.4 at most')


def test_installed_plugins(monkeypatch, tmp_path):
    folder = tmp_path / "jax_cuda13_plugin-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: jax-cuda13-plugin\nVersion: 9.9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert cuda_plugins()[13] == "9.9"
