"""Faults of JAX itself, each with the test that shows it in JAX alone.

A test that meets one is expected to fail, so a release of JAX that mends it is noticed.
"""

from __future__ import annotations

import jax
import pytest

from isoshard.core.runtime.private_names import release

_VERSION = release(jax.__version__)

OF_JAX_9 = _VERSION < (0, 10)
OF_JAX_11 = (0, 11) <= _VERSION < (0, 12)

erf_in_shard_map = pytest.mark.xfail(
    _VERSION >= (0, 12),
    raises=ValueError,
    reason="JAX 0.12: lax.polynomial, in the derivative of erf, takes no varying manual axes",
)
named_axis_of_vmap = pytest.mark.xfail(
    _VERSION >= (0, 11),
    raises=ValueError,
    reason="JAX 0.11: psum over the axis of a vmap does not take it from an Explicit layout",
)
host_memory_of_the_cpu = pytest.mark.xfail(
    OF_JAX_9,
    raises=(RuntimeError, AssertionError),
    reason="JAX 0.9: programs over several CPU devices give no results in host memory",
)
depthwise_on_a_part_of_a_mesh = pytest.mark.xfail(
    raises=AssertionError,
    reason="XLA, JAX 0.9 to 0.12: the weight's gradient of a depthwise convolution is counted once "
    "for each copy of a batch that is split over some axes of a mesh only",
)
