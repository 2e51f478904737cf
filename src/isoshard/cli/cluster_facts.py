"""The facts of one rank: interfaces, devices, and the transfer rates between them.

>>> "lo" in interfaces() or "lo0" in interfaces()
True
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux
_BYTES = 4 << 20
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface of this machine; "" where it has none."""
    return {name: _address(name) for _, name in socket.if_nameindex()}


def free_ports() -> str:
    """The range that the system takes free ports from, which ranks connect at."""
    if not _PORTS.exists():
        return "any free port"
    first, last = _PORTS.read_text().split()
    return f"free ports, {first} to {last}"


def rates() -> dict[str, float]:
    """Bytes per second between this rank's memory, its device, and all devices; collective.

    Every rank must call it.
    """
    host = np.ones(_BYTES // 4, np.float32)
    first = jax.local_devices()[0]
    on_device = jax.block_until_ready(jax.device_put(host, first))
    measured = {
        f"host to {first.platform}": _rate(lambda: jax.device_put(host, first)),
        f"{first.platform} to host": _rate(lambda: np.array(on_device + 0)),
    }
    if jax.device_count() > 1:
        mesh = Mesh(np.array(jax.devices()), "all")
        copies = [jax.device_put(host[None], device) for device in jax.local_devices()]
        terms = jax.make_array_from_single_device_arrays(
            (jax.device_count(), host.size), NamedSharding(mesh, P("all")), copies
        )
        total = jax.jit(lambda x: jnp.sum(x, 0), out_shardings=NamedSharding(mesh, P()))
        name = f"JAX, all-reduce over {jax.device_count()} devices"
        measured[name] = _rate(lambda: total(terms))
    if (torch := sys.modules.get("torch")) and jax.process_count() > 1:
        group = torch.distributed
        value = torch.ones(host.size)
        measured[f"torch, all-reduce over {jax.process_count()} ranks (gloo)"] = _rate(
            lambda: group.all_reduce(value)
        )
    return measured


def _rate(action: Callable[[], Any]) -> float:
    """Bytes per second of the best of three runs, after one that may compile."""
    jax.block_until_ready(action())
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(action())
        seconds.append(time.perf_counter() - begin)
    return _BYTES / min(seconds)


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _ADDRESS_OF, request)[20:24])
        except OSError:  # it is down, or has IPv6 only
            return ""
