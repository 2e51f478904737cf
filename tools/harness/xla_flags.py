"""XLA flags with which small programs compile faster on the CPU.

XLA ends the process at a flag that it does not know, so flags are chosen by JAX's version.
"""

from __future__ import annotations

ONE_MODULE = "--xla_cpu_parallel_codegen_split_count=1"
"""One module for LLVM instead of many small ones."""


def without_mlir(jax_version: str) -> str:
    """The flag by which kernels are written without MLIR: a third less time for small programs.

    Args:
        jax_version: from 0.11 on XLA has no such flag.

    Example:
        >>> without_mlir("0.10.2"), without_mlir("0.11.2")
        ('--xla_cpu_use_fusion_emitters=false', '')
    """
    release = tuple(int(number) for number in jax_version.split(".")[:2])
    return "--xla_cpu_use_fusion_emitters=false" if release < (0, 11) else ""
