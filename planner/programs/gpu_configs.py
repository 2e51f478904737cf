"""GPUs as XLA's compiler has to be told of them: its `GpuTargetConfigProto`, as text.

Sources: NVIDIA's data sheets and tuning guides of each architecture (multiprocessors, caches,
bandwidth, clock), https://docs.nvidia.com/cuda/ampere-tuning-guide, .../hopper-tuning-guide,
.../blackwell-tuning-guide; limits by compute capability from the CUDA C++ programming guide.
"""

from __future__ import annotations

import dataclasses

from isoshard.core.errors import ShardingError


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What XLA plans kernels with.

    Attributes:
        name: of the device, as CUDA says it.
        capability: CUDA's compute capability.
        cores: multiprocessors.
        memory: bytes.
        bandwidth: bytes a second.
        cache: bytes of the second-level cache.
        clock: in GHz.
        shared: bytes of shared memory of one multiprocessor.
        block_shared: bytes of it that one block may ask for.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: float
    cache: int
    clock: float
    shared: int = 228 * 1024
    block_shared: int = 227 * 1024


_MIB = 1024 * 1024
GPUS = {
    "a100": GpuFacts(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * 10**9, 2.039e12, 40 * _MIB, 1.41,
        164 * 1024, 163 * 1024,
    ),
    "h100": GpuFacts("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * 10**9, 3.35e12, 50 * _MIB, 1.98),
    "h200": GpuFacts("NVIDIA H200", (9, 0), 132, 141 * 10**9, 4.8e12, 50 * _MIB, 1.98),
    "b200": GpuFacts("NVIDIA B200", (10, 0), 148, 180 * 10**9, 8e12, 126 * _MIB, 1.965),
    "gb200": GpuFacts("NVIDIA GB200", (10, 0), 152, 186 * 10**9, 8e12, 126 * _MIB, 2.062),
}  # fmt: skip
"""By the name of the chip in a topology."""


def target_config(chip: str) -> str:
    """The text that XLA's compiler for GPUs takes for a chip.

    Args:
        chip: a name of `GPUS`.

    Raises:
        ShardingError: the compiler's numbers of this chip are not known.

    Example:
        >>> target_config("h100").splitlines()[1].strip()
        'threads_per_block_limit: 1024'
    """
    if chip not in GPUS:
        raise ShardingError(
            f"XLA's compiler cannot be told of {chip!r}; it can of {', '.join(sorted(GPUS))}. "
            "Estimate with depth='trace' or 'partition'"
        )
    one = GPUS[chip]
    major, minor = one.capability
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": one.shared,
        "threads_per_core_limit": 2048,
        "core_count": one.cores,
        "fpus_per_core": 64 if one.capability == (8, 0) else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(one.bandwidth),
        "l2_cache_size": one.cache,
        "clock_rate_ghz": one.clock,
        "device_memory_size": one.memory,
        "shared_memory_per_block_optin": one.block_shared,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    rows = "\n".join(f"  {name}: {value}" for name, value in numbers.items())
    return (
        f"gpu_device_info {{\n{rows}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        "runtime_version { major: 12 minor: 9 }\n"
        f'device_description_str: "{one.name}"\n'
    )
