"""XLA flags with which the tests compile faster, as far as the installed jaxlib has them.

XLA ends the process at a flag that it does not know, so flags are chosen by version.
"""

import jax

_WITHOUT_EMITTERS = (0, 11)
"""The first JAX whose CPU compiler always writes its kernels with MLIR."""

ONE_BY_ONE = ("--xla_cpu_parallel_codegen_split_count=1",)
"""One module for LLVM instead of many small ones."""

if jax.__version_info__ < _WITHOUT_EMITTERS:
    WITHOUT_MLIR: tuple[str, ...] = ("--xla_cpu_use_fusion_emitters=false",)
    """Kernels written without MLIR: a third less time for small programs."""
else:
    WITHOUT_MLIR = ()
