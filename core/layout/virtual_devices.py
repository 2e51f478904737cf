"""Virtual devices: a mesh of many CPU devices on a machine with one.

`simulate_devices` splits the CPU into virtual devices. The number is fixed when JAX's backend
starts, which its first array or `jax.devices()` call does, so call this before anything else:

    import isoshard as iso
    iso.simulate_devices(8)

Calling it again with the same number changes nothing:

>>> len(simulate_devices(8))
8
"""

from __future__ import annotations

from typing import Any

import jax

from isoshard.core.errors import DeviceError

Device = Any  # jax.Device, which type checkers take for a variable


def simulate_devices(n: int = 8) -> list[Device]:
    """Run on `n` virtual CPU devices, which share the cores and the memory of the machine.

    This process then does not use accelerators.

    Args:
        n: the number of devices, at least 1.

    Returns:
        The devices. Listing them starts the backend.

    Raises:
        DeviceError: the backend has started with other devices.

    Example:
        >>> simulate_devices(3)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.DeviceError: cannot simulate 3 devices: JAX is already running on 8 cpu devices. Call iso.simulate_devices(3) first in a new process, before any array is created or jax.devices() is called; or use the available devices: make_mesh takes the first of them.
    """  # noqa: E501
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise DeviceError(f"cannot simulate {n!r} devices: pass an integer, 1 or more")
    try:
        jax.config.update("jax_num_cpu_devices", n)
    except RuntimeError:
        pass  # the backend has started; what counts is what is running
    else:
        jax.config.update("jax_platforms", "cpu")  # so that jax.devices() lists the virtual ones
    devices = jax.devices()
    if len(devices) != n or devices[0].platform != "cpu":
        raise DeviceError(
            f"cannot simulate {n} devices: JAX is already running on {len(devices)} "
            f"{devices[0].platform} devices. Call iso.simulate_devices({n}) first in a new "
            "process, before any array is created or jax.devices() is called; or use the available "
            "devices: make_mesh takes the first of them."
        )
    return devices
