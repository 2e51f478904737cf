"""Chips: compute rates, memory and links.

Rates are of one chip in one direction, in units a second, from the pages in `source`; a program
reaches a share of them (see `isoshard.planner.costs`).

>>> chip("v5e").memory, chip("v5e").rate("bfloat16")
(16000000000, 197000000000000.0)

Your own chip is a line: `add_chip(Chip("mine", "My Device", "gpu", {"float32": 1e12}, ..))`, or a
copy with changes: `add_chip(dataclasses.replace(chip("h100"), name="slow", ..))`.

The rate of float32 is that of JAX's default precision: one pass of bfloat16 on TPU, TF32 on GPU
(https://docs.jax.dev/en/latest/201/precision.html). Rates are without sparsity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from isoshard.core.kit import ShardingError

_NARROW = {"float16": "bfloat16", "uint8": "int8", "int4": "int8", "uint4": "int8"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator.

    Attributes:
        name: as in the text of a topology, e.g. "v5e".
        kind: JAX's `Device.device_kind`.
        platform: "tpu", "gpu" or "cpu".
        flops: operations a second by dtype name, "float32" among them; "float8" is for all such
            types.
        memory: bytes of high-bandwidth memory.
        bandwidth: bytes a second between it and the cores.
        link: bytes a second and direction of one link to a neighbour; of a switch, of one chip.
        links: axes of the torus that links span; 0: a switch joins the chips of a host.
        per_host: chips of one host.
        network: bytes a second and direction from one chip to chips of other hosts (of a torus: of
            other slices).
        latency: seconds before the first byte of a message over a link arrives.
        source: of the numbers.
        wrap: an axis of the torus has wrap-around links if this divides its length; 0: none has.
            A torus of three axes consists of cubes: it must divide all of them.
        shapes: grids of a slice that the vendor offers; () allows all. Of three axes those of
            less than a cube.
        largest: the most chips of one slice; 0: no limit.
        host: the grid of one host's chips within the torus.
        domain: chips that one switch joins, where these are of several hosts; 0: those of a host.
        network_latency: seconds before the first byte from another host (slice) arrives.
        also: other values of `Device.device_kind` for the same chip.
        copied: of virtual devices, bytes a second that a collective copies to one, by HLO's name of
            the kind and the size of a group; `link` for others.
        reordered: of virtual devices, bytes a second, read or written, of copies to another layout;
            0: `bandwidth`.
        meetings: of virtual devices, seconds of a collective of no bytes by the size of a group;
            `latency` for others.
        waits: of virtual devices, seconds that a group of a size waits for its last device besides,
            after `between` or more of work; after less, in proportion.
        between: seconds of that work; 0: they wait so long after any.
        fresh: of virtual devices, bytes a second of newly allocated memory; 0: it takes no time.
        kept: of virtual devices, the most bytes of temporaries that are not newly allocated in
            each step.

    Example:
        >>> half = dataclasses.replace(chip("v5e"), name="v5e-half", memory=8_000_000_000)
        >>> half.rate("bfloat16") == chip("v5e").rate("bfloat16")
        True
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
    wrap: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    largest: int = 0
    host: tuple[int, ...] = ()
    domain: int = 0
    network_latency: float = 1e-5
    also: tuple[str, ...] = ()
    copied: Mapping[str, Mapping[int, float]] = dataclasses.field(
        default_factory=dict[str, Mapping[int, float]], hash=False
    )
    reordered: float = 0.0
    meetings: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float], hash=False)
    waits: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float], hash=False)
    between: float = 0.0
    fresh: float = 0.0
    kept: int = 0

    def rate(self, dtype: str) -> float:
        """Operations a second in a dtype.

        Args:
            dtype: its name. 8-bit floats have the rate of "float8", narrow integers that of
                "int8", and of "bfloat16" where the chip has neither; wide floats half of "float32"
                unless the chip has a rate; all others that of "float32".

        Example:
            >>> h100 = chip("h100")
            >>> h100.rate("float8_e4m3fn") / h100.rate("float16") > 2
            True
        """
        for name in (dtype, "float8" if dtype.startswith("float8") else _NARROW.get(dtype, "")):
            if name in self.flops:
                return self.flops[name]
        if dtype.startswith("float8") or dtype in _NARROW:
            return self.flops.get("bfloat16", self.flops["float32"])
        if dtype in ("float64", "complex128"):
            return self.flops.get("float64", self.flops["float32"] / 2)
        return self.flops["float32"]


_CHIPS: dict[str, Chip] = {}


def add_chip(chip: Chip) -> None:
    """Add a chip to the table, or replace the one of its name.

    Args:
        chip: the chip; `topology` uses it by its name from now on.

    Raises:
        ShardingError: it has no rate for float32.

    Example:
        >>> add_chip(dataclasses.replace(chip("v5e"), name="v5e-half", memory=8_000_000_000))
        >>> chip("v5e-half").memory
        8000000000
    """
    if "float32" not in chip.flops:
        raise ShardingError(
            f"chip {chip.name!r} has rates for {', '.join(chip.flops) or 'no dtype'}: add one for "
            "float32, the default of all dtypes"
        )
    _CHIPS[chip.name] = chip


def chip(name: str) -> Chip:
    """Find a chip by its name.

    Args:
        name: e.g. "v5e".

    Raises:
        ShardingError: there is no chip of that name; the message lists the names.

    Example:
        >>> chip("h100").platform
        'gpu'
    """
    if name not in _CHIPS:
        raise ShardingError(
            f"there is no chip {name!r}; there are {', '.join(sorted(_CHIPS))}. Add it with "
            "iso.planner.add_chip(iso.planner.Chip(..))"
        )
    return _CHIPS[name]


def chips() -> tuple[Chip, ...]:
    """All chips of the table, by platform and name.

    Example:
        >>> {"v5e", "v5p", "h100"} <= {chip.name for chip in chips()}
        True
    """
    return tuple(sorted(_CHIPS.values(), key=lambda chip: (chip.platform, chip.name)))


def chip_of_kind(kind: str) -> Chip:
    """Find the chip of an attached device.

    Raises:
        ShardingError: no chip of the table has that kind.
    """
    for chip in _CHIPS.values():
        if kind == chip.kind or kind in chip.also:
            return chip
    raise ShardingError(
        f"there is no chip for devices of kind {kind!r}; there are "
        f"{', '.join(sorted(_CHIPS))}. Add it with iso.planner.add_chip(iso.planner.Chip(NAME, "
        f"{kind!r}, ..))"
    )


def peak_flops(kind: str) -> float | None:
    """Operations a second in bfloat16 of an attached device; None if it is not known.

    Args:
        kind: JAX's `Device.device_kind`.

    Example:
        >>> peak_flops("TPU v5 lite"), peak_flops("cpu")
        (197000000000000.0, None)
    """
    for chip in _CHIPS.values():
        if kind == chip.kind or kind in chip.also:
            return None if chip.platform == "cpu" else chip.rate("bfloat16")
    return None


_SCALING = "https://jax-ml.github.io/scaling-book/tpus"
"""Links, hosts' networks and latency of TPUs: the vendor's pages have only sums over all links."""
_CLOUD = "https://docs.cloud.google.com/tpu/docs"
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBE_PARTS = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_NCCL = "latencies: src/graph/tuning.cc of https://github.com/NVIDIA/nccl"
_GPUS = "https://jax-ml.github.io/scaling-book/gpus"
"""Memory, NVLink and network of GPUs; rates by dtype are NVIDIA's, by `_RATES`."""
_RATES = "https://glennklockwood.com/garden/processors"


def _tpu(rate: float, narrow: float) -> dict[str, float]:
    return {"bfloat16": rate, "float32": rate, "int8": narrow}


for _chip in (
    # 275 TFLOP/s in bf16 and int8, 32 GiB, 1200 GB/s, 4096 chips. The network of its hosts, 25 GB/s
    # for four chips, is the scaling book's.
    Chip(
        "v4", "TPU v4", "tpu", _tpu(2.75e14, 2.75e14), 32 * 2**30, 1.2e12, 4.5e10, 3, 4, 6.25e9,
        1e-6, f"{_CLOUD}/v4, {_SCALING}", wrap=4, shapes=_CUBE_PARTS, largest=4096, host=(2, 2, 1),
        network_latency=5e-5,
    ),
    # 197 TFLOP/s, int8 393, 16 GB, 819 GB/s, 2 x 100 Gb/s a host of eight chips, 256 chips.
    Chip(
        "v5e", "TPU v5 lite", "tpu", _tpu(1.97e14, 3.93e14), 16_000_000_000, 8.19e11, 4.5e10, 2, 4,
        3.125e9, 1e-6, f"{_CLOUD}/v5e, {_SCALING}", wrap=16, shapes=_FLAT, largest=256,
        host=(2, 2), network_latency=5e-5, also=("TPU v5e",),
    ),
    # 459 TFLOP/s, int8 918 (scaling book), 95 GiB, 2765 GB/s, 50 Gb/s a chip, 6144 chips in a job.
    Chip(
        "v5p", "TPU v5", "tpu", _tpu(4.59e14, 9.18e14), 95 * 2**30, 2.765e12, 9e10, 3, 4, 6.25e9,
        1e-6, f"{_CLOUD}/v5p, {_SCALING}", wrap=4, shapes=_CUBE_PARTS, largest=6144, host=(2, 2, 1),
        network_latency=5e-5, also=("TPU v5p",),
    ),
    # 918 TFLOP/s, int8 1836, 32 GB, 1638 GB/s, 4 x 200 Gb/s a host of eight chips, 256 chips.
    Chip(
        "v6e", "TPU v6 lite", "tpu", _tpu(9.18e14, 1.836e15), 32_000_000_000, 1.638e12, 9e10, 2, 4,
        1.25e10, 1e-6, f"{_CLOUD}/v6e, {_SCALING}", wrap=16, shapes=_FLAT, largest=256,
        host=(2, 2), network_latency=5e-5, also=("TPU v6e",),
    ),
    # The 80 GB SXM: bf16 312, TF32 156, FP64 19.5, int8 624; 8 x 200 Gb/s a host (DGX A100).
    Chip(
        "a100", "NVIDIA A100-SXM4-80GB", "gpu",
        {"bfloat16": 3.12e14, "float32": 1.56e14, "int8": 6.24e14, "float64": 1.95e13},
        80_000_000_000, 2.039e12, 3e11, 0, 8, 2.5e10, 3.4e-6,
        f"{_GPUS}, {_RATES}/A100, {_NCCL}", network_latency=9.6e-6,
    ),
    # SXM: bf16 989, TF32 494, FP64 67, fp8 and int8 1979 without sparsity; 8 x 400 Gb/s a host.
    Chip(
        "h100", "NVIDIA H100 80GB HBM3", "gpu",
        {"bfloat16": 9.89e14, "float32": 4.945e14, "int8": 1.979e15, "float8": 1.979e15,
         "float64": 6.7e13},
        80_000_000_000, 3.35e12, 4.5e11, 0, 8, 5e10, 3.4e-6,
        f"{_GPUS}, {_RATES}/h100, {_NCCL}", network_latency=9.6e-6,
    ),
    Chip(
        "h200", "NVIDIA H200", "gpu",
        {"bfloat16": 9.89e14, "float32": 4.945e14, "int8": 1.979e15, "float8": 1.979e15,
         "float64": 6.7e13},
        141_000_000_000, 4.8e12, 4.5e11, 0, 8, 5e10, 3.4e-6,
        f"{_GPUS}, {_RATES}/h100, {_NCCL}", network_latency=9.6e-6,
    ),
    # HGX at 1000 W: bf16 2250, TF32 1100, FP64 40, fp8 and int8 4500 without sparsity, 180 GB.
    Chip(
        "b200", "NVIDIA B200", "gpu",
        {"bfloat16": 2.25e15, "float32": 1.1e15, "int8": 4.5e15, "float8": 4.5e15,
         "float64": 4e13},
        180_000_000_000, 8e12, 9e11, 0, 8, 5e10, 3.4e-6,
        f"{_GPUS}, {_RATES}/B200, {_NCCL}", network_latency=9.6e-6,
    ),
    # A rack of 18 trays with four GPUs each and 13.4 TB for all 72
    # (https://aiwiki.ai/wiki/nvidia_gb200_nvl72); at 1200 W bf16 2500, TF32 1250, FP64 45, fp8 and
    # int8 5000 without sparsity.
    Chip(
        "gb200", "NVIDIA GB200", "gpu",
        {"bfloat16": 2.5e15, "float32": 1.25e15, "int8": 5e15, "float8": 5e15, "float64": 4.5e13},
        186_000_000_000, 8e12, 9e11, 0, 4, 5e10, 3.4e-6,
        f"{_GPUS}, {_RATES}/B200, {_NCCL}", domain=72,
        network_latency=9.6e-6,
    ),
    # Round numbers, the same everywhere, for a text such as "cpu:8"; the devices of this host are
    # measured (`measured_cpu`).
    Chip(
        "cpu", "cpu", "cpu", {"float32": 5e10, "bfloat16": 5e10, "float64": 2.5e10}, 2_000_000_000,
        1e10, 5e9, 0, 4096, 5e9, 1e-5, "round numbers of a core",
    ),
):  # fmt: skip
    add_chip(_chip)
