"""The NVIDIA driver of this machine, and the extra of JAX that installs CUDA for it.

JAX's CUDA plugin is one package for each major version of CUDA (`jax-cuda13-plugin`), and an extra
of JAX installs it (`jax[cuda13]`). A driver runs programs of CUDA versions up to the one that
`nvidia-smi` prints. The plugin compiles for GPUs without a driver, too.

>>> cuda_extra(offered=[12, 13], installed=[], driver="12.8")
'cuda12'
>>> cuda_extra(offered=[12, 13], installed=[], driver=None)    # no driver: the newest
'cuda13'
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Collection


def driver_cuda() -> str | None:
    """The newest version of CUDA that the NVIDIA driver runs.

    Returns:
        Such as "13.0"; "" if the driver does not report it; None without a working driver.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:  # nvidia-smi is installed, and finds no driver
        return None
    version = re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d+\.\d+)", done.stdout)
    return version[1] if version else ""


def cuda_plugins() -> dict[int, str]:
    """The versions of the CUDA plugins of JAX that are installed, by major version of CUDA."""
    installed = {}
    for major in _offered():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[major] = importlib.metadata.version(f"jax-cuda{major}-plugin")
    return installed


def cuda_extra(offered: Collection[int], installed: Collection[int], driver: str | None) -> str:
    """Choose an extra of JAX.

    Args:
        offered: the major versions of CUDA for which JAX has an extra.
        installed: those whose plugin is installed; where the driver runs one, it is kept.
        driver: as from `driver_cuda`.

    Returns:
        The newest that the driver runs. If it runs none, the oldest: the driver is too old for JAX.
    """
    if not offered:
        return "cuda"  # JAX's own choice
    newest = _major(driver) if driver else max(offered)
    fitting = [major for major in offered if major <= newest] or [min(offered)]
    return f"cuda{max(set(fitting) & set(installed) or fitting)}"


def install_cuda(jax_version: str = "") -> str:
    """The pip command that adds CUDA to JAX.

    Args:
        jax_version: that the plugin has to fit; by default the version installed here.
    """
    offered, driver = _offered(), driver_cuda()
    extra = cuda_extra(offered, cuda_plugins(), driver)
    command = f'pip install "jax[{extra}]=={jax_version or importlib.metadata.version("jax")}"'
    if driver and offered and _major(driver) < min(offered):
        return f"{command} and update the NVIDIA driver, which runs CUDA {driver} at most"
    return command


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _offered() -> list[int]:
    """The major versions of CUDA for which the installed JAX has an extra."""
    extras = importlib.metadata.metadata("jax").get_all("Provides-Extra") or []
    return [int(match[1]) for extra in extras if (match := re.fullmatch(r"cuda(\d+)", extra))]
