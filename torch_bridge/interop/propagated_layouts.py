"""What the compiler chooses for the layouts of a function's results, without compiling it.

Shardy completes layouts before XLA compiles: it goes along the operations from the layouts that are
known. That pass alone takes milliseconds and no devices, and is run here on a function that JAX has
lowered:

>>> import jax.numpy as jnp
>>> from jax.sharding import AbstractMesh, NamedSharding
>>> mesh = AbstractMesh((2, 4), ("x", "y"))
>>> struct = lambda shape, *spec: jax.ShapeDtypeStruct(
...     shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
>>> propagated(lambda a, b: (a @ b, a.sum(0)), [struct((8, 2), "x"), struct((2, 4), None, "y")])
[P('x', 'y'), P()]

A result that Shardy says nothing of is whole on every device.
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
            one mesh, which may be abstract; without one, nothing is known of the argument.
        platform: that it is lowered for.

    Returns:
        A PartitionSpec for each result.

    Raises:
        ShardingError: JAX is set to use another partitioner than Shardy.
    """
    if not jax.config.jax_use_shardy_partitioner:
        raise ShardingError(
            "the layouts of results are found by Shardy, and jax_use_shardy_partitioner is off; "
            "say them: iso.jax_function(.., out_sharding=..)"
        )
    traced = jax.jit(function, keep_unused=True).trace(*shapes)
    module: Any = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    with module.context:
        compilation.PASS_MANAGER.found().parse(_PASSES).run(module.operation)
        main = next(one for one in module.body.operations if _name(one) == "main")
        silent = [""] * len(jax.tree.leaves(traced.out_info))
        said = main.attributes["res_attrs"] if "res_attrs" in main.attributes else silent
        return [_spec(str(one)) for one in said]


def _name(operation: Any) -> str:
    has = "sym_name" in operation.attributes
    return str(operation.attributes["sym_name"]).strip('"') if has else ""


def _spec(text: str) -> P:
    found = _SHARDING.search(text)
    entries: list[Any] = []
    for entry in _ENTRY.findall(found[1]) if found else ():
        axes = []
        for name, part in _AXIS.findall(entry):
            if part:  # of an axis a part only, which no PartitionSpec can say
                break
            axes.append(name)
        entries.append(axes[0] if len(axes) == 1 else tuple(axes) or None)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)
