"""Properties of TPUs that scripts query, from JAX.

>>> num_available_chips(), num_available_devices(), num_tpu_workers()
(0, 0, 1)
"""

from __future__ import annotations

import math
import os
import re

import jax

from isoshard.core.kit import Device

_NAMES = {"lite": "e"}


def _chips(local: bool = True) -> list[Device]:
    devices = jax.local_devices() if local else jax.devices()
    return [device for device in devices if device.platform == "tpu"]


def num_available_chips() -> int:
    """How many TPU chips this machine has: 0 without any."""
    coordinates = {tuple(getattr(chip, "coords", (chip.id,))) for chip in _chips()}
    return len(coordinates)


def num_available_devices() -> int:
    """How many TPU devices this machine has; older chips are two each."""
    return len(_chips())


def num_expected_global_devices() -> int:
    """How many TPU devices the job has."""
    return len(_chips(local=False))


def num_logical_cores_per_chip() -> int:
    """How many devices a chip is.

    Raises:
        OSError: there is no TPU.
    """
    get_tpu_type()
    return num_available_devices() // num_available_chips()


def num_local_processes() -> int:
    """How many processes use the TPU chips of this machine: one in SPMD; 0 without chips."""
    return min(num_available_chips(), 1)


def num_tpu_workers() -> int:
    """How many machines the job has."""
    return jax.process_count()


def process_bounds_size() -> int | None:
    """How many processes `TPU_PROCESS_BOUNDS` names; None if it is not set."""
    bounds = os.environ.get("TPU_PROCESS_BOUNDS")
    return math.prod(map(int, bounds.split(","))) if bounds else None


def task_id() -> int | None:
    """`CLOUD_TPU_TASK_ID`, or None."""
    text = os.environ.get("CLOUD_TPU_TASK_ID")
    return None if text is None else int(text)


def worker_id() -> int:
    """The number of this machine in the job."""
    return jax.process_index()


def version() -> int:
    """The generation of the chips, such as 4.

    Raises:
        OSError: there is no TPU.
    """
    return int(get_tpu_type()[1])


def get_tpu_type() -> str:
    """The kind of the chips, such as `"v5p"` or `"v6e"`.

    Raises:
        OSError: there is no TPU.
    """
    chips = _chips()
    if not chips:
        raise OSError(
            f"there is no TPU: JAX runs on {jax.default_backend()}. Ask num_available_chips() first"
        )
    return tpu_type(chips[0].device_kind)


def tpu_type(device_kind: str) -> str:
    """The short name of a kind of chips.

    Args:
        device_kind: in JAX's words.

    Raises:
        OSError: it is no TPU's.

    >>> [tpu_type(kind) for kind in ("TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6e", "TPU v5")]
    ['v4', 'v5e', 'v5p', 'v6e', 'v5p']
    """
    match = re.match(r"TPU v(\d)\s*(lite|e|p|i)?", device_kind)
    if not match:
        raise OSError(f"{device_kind!r} is no TPU whose generation is known")
    generation, letter = match.groups()
    if generation == "5" and letter is None:
        letter = "p"
    return f"v{generation}{_NAMES.get(letter or '', letter or '')}"


def get_worker_ips() -> list[str]:
    """The names in `TPU_WORKER_HOSTNAMES`; `["localhost"]` for one machine."""
    names = [name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    return names if len(names) > 1 else ["localhost"]


def discover_master_worker_ip(use_localhost: bool = True) -> str:
    """The address of process 0.

    Args:
        use_localhost: not used.

    Raises:
        RuntimeError: it is not known.
    """
    from isoshard.torch_xla_bridge.torch_xla.runtime import get_master_ip

    return get_master_ip()
