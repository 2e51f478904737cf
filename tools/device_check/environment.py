"""The device, the driver and the versions that the check runs with."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

PACKAGES = ("isoshard", "jax", "jaxlib", "torch", "transformers", "numpy", "triton")


def run(part: str, options: Mapping[str, Any], save: Callable[..., None]) -> None:
    """Record the versions, JAX's first device, and whether torch has CUDA.

    Args:
        part: the section's only part.
        options: unused.
        save: receives the results.
    """
    save(versions={"python": platform.python_version(), **versions()}, driver=driver())
    import jax  # after the versions are saved: the import may fail
    import torch

    device = jax.devices()[0]
    save(
        platform=device.platform,
        kind=device.device_kind,
        devices=len(jax.devices()),
        jax_runtime=" ".join(device.client.platform_version.split()),
        torch_cuda=torch.version.cuda if torch.cuda.is_available() else None,
    )


def versions() -> dict[str, str | None]:
    """The versions of `PACKAGES`; None for a package that is not installed."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """The version of NVIDIA's driver; None if there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 else None
