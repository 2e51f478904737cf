"""What a compiler is asked for: operators that split themselves, orders in memory, the cache.

What takes time to import is looked up when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .declared import NAMES

CUSTOM_PARTITIONING = NAMES.state(
    "jax.experimental.custom_partitioning.custom_partitioning",
    why="asks a function how an operator is split, once its operands have layouts",
    without="operators that split themselves (attention, Fourier transforms) raise",
)

SPLASH_KERNEL = NAMES.state(
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel.make_splash_mha",
    why="is the attention kernel of TPUs",
    without="attention of long sequences on TPUs raises",
)

SPLASH_BLOCKS = NAMES.state(
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel.BlockSizes",
    why="are the blocks of that kernel",
    without="attention of long sequences on TPUs raises",
)

SPLASH_SEGMENTS = NAMES.state(
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel.SegmentIds",
    why="tells that kernel which tokens are of one document",
    without="attention of long sequences on TPUs raises",
)

SPLASH_HEADS = NAMES.state(
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask.MultiHeadMask",
    why="is the mask of that kernel",
    without="attention of long sequences on TPUs raises",
)

SPLASH_FULL = NAMES.state(
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask.FullMask",
    why="hides nothing from a query",
    without="attention of long sequences on TPUs raises",
)

SPLASH_WINDOW = NAMES.state(
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask.LocalMask",
    why="hides what is outside a window",
    without="attention of long sequences on TPUs raises",
)

MEMORY_ORDER = NAMES.state(
    "jax.experimental.layout.Layout",
    why="is the order of the axes of an array in memory",
    without="Fourier transforms on a mesh raise",
)

IN_MEMORY_ORDER = NAMES.state(
    "jax.experimental.layout.with_layout_constraint",
    why="keeps the axes of an operand of XLA's transform in order, where its CPU backend needs it",
    without="Fourier transforms on a mesh raise",
)

RESET_CACHE = NAMES.state(
    "jax.experimental.compilation_cache.compilation_cache.reset_cache",
    why="lets JAX look again whether there is a cache on disk, as it does at its first compilation",
    without="`iso.compilation_cache` raises",
)

EVENT_LISTENER = NAMES.state(
    "jax.monitoring.register_event_listener",
    why="tells of each program that was read from that cache",
    without="`iso.compilation_cache` raises",
)

record_event: Callable[..., Any] = NAMES.bind(
    "jax.monitoring.record_event",
    otherwise=lambda *_: None,
    why="is what calls those who listen to JAX's events",
    without="a step may be captured anew in each call, where something listens to these events",
)

PASS_MANAGER = NAMES.state(
    "jax.extend.mlir.passmanager.PassManager",
    why="runs the compiler's pass that completes layouts, and nothing else",
    without="`iso.jax_function` raises where the layouts of results are asked of the compiler",
)

SHARDING_GROUP = NAMES.state(
    "jax.extend.mlir.dialects.sdy.sharding_group",
    why="asks Shardy for one sharding of several values",
    without="`xs.shard_as` raises",
)

TOPOLOGY = NAMES.state(
    "jax.experimental.topologies.get_topology_desc",
    why="describes TPUs and GPUs that are not attached to the compiler",
    without="compiling for them raises; `planner/programs/worker.py` looks it up, in an "
    "interpreter without isoshard",
)
