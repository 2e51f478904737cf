"""By how much figures of the planner may differ from those that `benchmarks/results` keeps.

They were made with the reference versions. Another JAX traces a few equations otherwise, such as
those of an activation's gradient.
"""

import jax

from tools.versions.pairs import PAIRS

OF_THIS_JAX = jax.__version__ == PAIRS["reference"].jax
NEAR = 1e-9 if OF_THIS_JAX else 0.05
