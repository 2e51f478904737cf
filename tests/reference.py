"""The versions that figures of docs and of `benchmarks/results` were made with.

Another JAX traces a few equations otherwise, such as those of an activation's gradient, so the
planner's figures differ a little there.
"""

import importlib.metadata

from tools.versions.pairs import PAIRS

OF_THIS_JAX = importlib.metadata.version("jax") == PAIRS["reference"].jax
NEAR = 1e-9 if OF_THIS_JAX else 0.05
