"""The shardings that the compiler chooses for a function's results, without compiling it.

Shardy propagates shardings along the operations before XLA compiles. That pass alone takes
milliseconds and no devices, and runs here on a function that JAX has lowered:

>>> import jax.numpy as jnp
>>> from jax.sharding import AbstractMesh, NamedSharding
>>> mesh = AbstractMesh((2, 4), ("x", "y"))
>>> struct = lambda shape, *spec: jax.ShapeDtypeStruct(
...     shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
>>> propagated(lambda a, b: (a @ b, a.sum(0)), [struct((8, 2), "x"), struct((2, 4), None, "y")])
[P('x', 'y'), P()]

A result without a sharding of Shardy's is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals import compilation

_PASSES = "builtin.module(sdy-propagation-pipeline)"
_SHARDING = re.compile(r"#sdy\.sharding<@\w+, \[(.*?)\]")
_ENTRY = re.compile(r"\{([^{}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(:?)')


def propagated(function: Callable[..., Any], shapes: Sequence[Any], platform: str = "cpu") -> Any:
    """The specs of a function's results, given those of its arguments.

    Args:
        function: of arrays, to a list or tuple of arrays.
        shapes: a `jax.ShapeDtypeStruct` of each argument, with a NamedSharding over Auto axes of
            one mesh, which may be abstract; without one, Shardy chooses.
        platform: that it is lowered for.

    Raises:
        ShardingError: JAX is set to use another partitioner than Shardy.
    """
    if not jax.config.jax_use_shardy_partitioner:
        raise ShardingError(
            "the layouts of results are Shardy's choice, and jax_use_shardy_partitioner is off; "
            "give them: iso.jax_function(.., out_sharding=..)"
        )
    traced = jax.jit(function, keep_unused=True).trace(*shapes)
    module: Any = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    with module.context:
        compilation.PASS_MANAGER.resolve().parse(_PASSES).run(module.operation)
        main = next(operation for operation in module.body.operations if _name(operation) == "main")
        empty = [""] * len(jax.tree.leaves(traced.out_info))
        attributes = main.attributes["res_attrs"] if "res_attrs" in main.attributes else empty
        return [_spec(str(attribute)) for attribute in attributes]


def _name(operation: Any) -> str:
    has = "sym_name" in operation.attributes
    return str(operation.attributes["sym_name"]).strip('"') if has else ""


def _spec(text: str) -> P:
    match = _SHARDING.search(text)
    entries: list[Any] = []
    for entry in _ENTRY.findall(match[1]) if match else ():
        axes = []
        for name, subaxis in _AXIS.findall(entry):
            if subaxis:  # a sub-axis, which a PartitionSpec cannot express
                break
            axes.append(name)
        entries.append(axes[0] if len(axes) == 1 else tuple(axes) or None)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
