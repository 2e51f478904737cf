"""Settings with which small programs compile faster on the CPU.

XLA ends the process at a flag that it does not know, so flags are chosen by JAX's version.
"""

from __future__ import annotations

SINGLE_MODULE = "--xla_cpu_parallel_codegen_split_count=1"
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


def quick_variables(jax_version: str, flags: str = "") -> dict[str, str]:
    """Environment variables for programs that run once or twice: half the time to compile.

    LLVM does not work hard, XLA writes its kernels without MLIR and in one piece, and JAX gives an
    operation its own line and not the stack. XLA's own passes are those of users.

    Args:
        jax_version: see `without_mlir`.
        flags: XLA flags to keep.
    """
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS": "0",
        "XLA_FLAGS": f"{without_mlir(jax_version)} {SINGLE_MODULE} {flags}".strip(),
    }
