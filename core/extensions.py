"""Extension points: functions that the heart calls and an annex, or a later room, provides.

`core`, `jax_bridge` and `torch_bridge` (the heart) import no annex (`planner`, `domain`,
`onnx_bridge`, `torch_xla_bridge`), and a room of core imports no later one. Where they need a
function of these, they call a point of this module. The facade lists the function of each point
(`src/isoshard/_annexes.py`), which is imported at the first call.

>>> double = ExtensionPoint("double", "Twice a number.")
>>> double(2)
Traceback (most recent call last):
    ...
RuntimeError: no annex provides 'double' (Twice a number.); import isoshard before its parts
>>> double.provide("operator:neg")
>>> double(2)
-2
"""

from __future__ import annotations

import importlib
from typing import Any


class ExtensionPoint:
    """A function that is imported at its first call, from another package.

    Attributes:
        name: of the function here.
        purpose: one sentence on what it returns.
    """

    __slots__ = ("_function", "_source", "name", "purpose")

    def __init__(self, name: str, purpose: str):
        """See the class."""
        self.name = name
        self.purpose = purpose
        self._source: str | None = None
        self._function: Any = None

    def provide(self, source: str) -> None:
        """Set the function, as "module:name"; nothing is imported."""
        self._source = source
        self._function = None

    def load(self) -> Any:
        """Return the function.

        Raises:
            RuntimeError: no annex has provided it.
        """
        if self._function is None:
            if self._source is None:
                raise RuntimeError(
                    f"no annex provides {self.name!r} ({self.purpose}); import isoshard before its "
                    "parts"
                )
            module, _, name = self._source.partition(":")
            self._function = getattr(importlib.import_module(module), name)
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return (self._function or self.load())(*args, **kwargs)


# Operators on split axes, by `domain`: by halos where blocks are equal, block by block where not.
by_halos = ExtensionPoint("by_halos", "A window operator on split axes, by halo exchange.")
cotangent_by_halos = ExtensionPoint("cotangent_by_halos", "The input's cotangent of `by_halos`.")
operand_cotangent_by_halos = ExtensionPoint(
    "operand_cotangent_by_halos", "The kernel's cotangent of `by_halos`."
)
conv_operator = ExtensionPoint("conv_operator", "A convolution for `by_halos`.")
transposed_operator = ExtensionPoint("transposed_operator", "A transposed one for `by_halos`.")
max_operator = ExtensionPoint("max_operator", "Max pooling for `by_halos`.")
mean_operator = ExtensionPoint("mean_operator", "Average pooling for `by_halos`.")
resize_operator = ExtensionPoint("resize_operator", "Resizing for `by_halos`.")
block_conv = ExtensionPoint("block_conv", "A convolution of arrays in blocks.")
block_conv_transpose = ExtensionPoint("block_conv_transpose", "A transposed one.")
block_interpolate = ExtensionPoint("block_interpolate", "Resizing of arrays in blocks.")
block_max_pool = ExtensionPoint("block_max_pool", "Max pooling of arrays in blocks.")
block_avg_pool = ExtensionPoint("block_avg_pool", "Average pooling of arrays in blocks.")
block_pad = ExtensionPoint("block_pad", "Padding of arrays in blocks.")
scan_where_split = ExtensionPoint("scan_where_split", "A cumulative operator along a split axis.")
split_fft = ExtensionPoint("split_fft", "A Fourier transform that may be along split axes.")
partitioned_attention = ExtensionPoint(
    "partitioned_attention", "Attention's static arguments; called, it is partitioned."
)
attend_in_blocks = ExtensionPoint("attend_in_blocks", "Attention of arrays in blocks.")
gradients_in_blocks = ExtensionPoint("gradients_in_blocks", "Its cotangents.")

# Verbs of `domain` on torch tensors.
call_domain_verb = ExtensionPoint("call_domain_verb", "A verb of `iso.domain`, on tensors.")
call_function_handler = ExtensionPoint(
    "call_function_handler", "A torch function, done by its handler on shards."
)

# Steps as `planner` takes them, and the results of its search.
spread_shardings = ExtensionPoint("spread_shardings", "Sharding propagation over a jaxpr.")
traced_flax_step = ExtensionPoint("traced_flax_step", "A step of Flax, traced without data.")
traced_train_step = ExtensionPoint("traced_train_step", "A `training_step`, likewise.")
marked_modules = ExtensionPoint("marked_modules", "Context that names modules' outputs.")
traced_torch_step = ExtensionPoint("traced_torch_step", "A step of torch, likewise.")
shard_step = ExtensionPoint("shard_step", "Shardings for a step, searched at its first call.")
automatic_plan = ExtensionPoint("automatic_plan", "The plan that the search chose for a module.")
search_plan = ExtensionPoint("search_plan", "`Plan.auto`: the best plan for a step.")

# What `planner` knows of chips.
peak_flops = ExtensionPoint("peak_flops", "Operations a second of an attached device.")

# Verbs on arrays in blocks of unequal sizes, by `core/blocks`, which imports `core/transfer`.
shard_padded = ExtensionPoint("shard_padded", "A tree sharded with padding.")
reshard_uneven = ExtensionPoint("reshard_uneven", "An `UnevenArray`, resharded.")
gather_uneven = ExtensionPoint("gather_uneven", "An `UnevenArray` as an unsharded array.")

POINTS: tuple[ExtensionPoint, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, ExtensionPoint)
)
