"""The chips that machines are described with: what one computes, holds and moves.

Rates are of one chip in one direction, in units a second, as the vendors' pages tell them; a
program reaches a part of them (`isoshard.core.planner.costs` says which).

>>> chip("v5e").memory, chip("v5e").flops["bfloat16"]
(16000000000, 197000000000000.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from isoshard.core.errors import ShardingError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        name: as in the text of a topology, e.g. "v5e".
        kind: as JAX's `Device.device_kind` says it.
        platform: "tpu", "gpu" or "cpu".
        flops: operations a second by dtype name; other dtypes go by "float32".
        memory: bytes of high-bandwidth memory.
        bandwidth: bytes a second between it and the cores.
        link: bytes a second and direction of one link to a neighbour; of a switch, of one chip.
        links: axes of the torus that links span; 0: a switch joins the chips of a host.
        per_host: chips of one host.
        network: bytes a second and direction from one chip to chips of other hosts (of a torus: of
            other slices).
        latency: seconds before the first byte of a message over a link arrives.
        source: where the numbers are from.
    """

    name: str
    kind: str
    platform: str
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    memory: int
    bandwidth: float
    link: float
    links: int
    per_host: int
    network: float
    latency: float
    source: str


_CHIPS: dict[str, Chip] = {}


def add_chip(chip: Chip) -> None:
    """Add a chip to the table, or replace the one of its name.

    Args:
        chip: what `topology` finds by its name from now on.
    """
    _CHIPS[chip.name] = chip


def chip(name: str) -> Chip:
    """Find a chip by its name.

    Args:
        name: e.g. "v5e".

    Raises:
        ShardingError: there is none of that name; the message lists those there are.
    """
    if name not in _CHIPS:
        raise ShardingError(
            f"there is no chip {name!r}; known are {', '.join(sorted(_CHIPS))}. Add one with "
            "iso.planner.add_chip(iso.planner.Chip(..))"
        )
    return _CHIPS[name]


_SCALING = "https://jax-ml.github.io/scaling-book/tpus"
for _chip in (
    Chip(
        "v5e", "TPU v5 lite", "tpu", {"bfloat16": 1.97e14, "float32": 4.9e13, "int8": 3.94e14},
        16_000_000_000, 8.1e11, 4.5e10, 2, 8, 6.25e9, 1e-6, _SCALING,
    ),
    Chip(
        "h100", "NVIDIA H100 80GB HBM3", "gpu", {"bfloat16": 9.9e14, "float32": 6.7e13},
        80_000_000_000, 3.35e12, 4.5e11, 0, 8, 5e10, 3e-6,
        "https://www.nvidia.com/en-us/data-center/h100/",
    ),
    Chip(
        "cpu", "cpu", "cpu", {"float32": 5e10, "bfloat16": 5e10}, 2_000_000_000, 1e10, 5e9, 0,
        4096, 5e9, 1e-5, "this machine's cores, shared by virtual devices",
    ),
):  # fmt: skip
    add_chip(_chip)
