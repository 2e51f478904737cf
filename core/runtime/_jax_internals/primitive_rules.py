"""Rules of a primitive: how it is lowered, differentiated and batched.

`isoshard.core.runtime.primitives` registers them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .declared import NAMES

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.interpreters.ad import Zero
else:
    ShapedArray = NAMES.bind(
        "jax.core.ShapedArray",
        why="is the type of a primitive's result",
        without="Fourier transforms raise",
    )
    Zero = NAMES.bind(
        "jax.interpreters.ad.Zero",
        why="is the tangent of a value that does not change",
        without="derivatives of functions with a rule for blocks, and plans with a gradient of a "
        "Flax module, raise",
    )

_PRIMITIVES = (
    "Fourier transforms, functions with a rule for blocks and `lay_in_blocks`, `xs.shard_as`, "
)
_PRIMITIVES += "and plans with a gradient of a Flax module, raise"


def _bind(name: str, why: str) -> Any:
    return NAMES.bind(f"jax.interpreters.{name}", why=why, without=_PRIMITIVES)


lower_fun = _bind("mlir.lower_fun", "makes a lowering of a function of arrays")
register_lowering = _bind("mlir.register_lowering", "says how a primitive is compiled")
deflinear2 = _bind("ad.deflinear2", "says how a linear primitive is differentiated")
jvp_rules = _bind("ad.primitive_jvps", "has the derivatives of primitives that are not linear")
is_undefined_primal = _bind("ad.is_undefined_primal", "tells in which operands one is transposed")
defvectorized = _bind("batching.defvectorized", "says that a primitive works on more axes as it is")
batching_rules = _bind("batching.primitive_batchers", "has the rules of primitives under `vmap`")
named_batching_rules = _bind(
    "batching.fancy_primitive_batchers", "has those that ask which axis `vmap` adds"
)


def for_export(context: Any) -> bool:
    """Whether a program is lowered to be written down by `jax.export`.

    Args:
        context: as a lowering is given it. Where it does not say (JAX has no public name for that),
            the program is taken to be for this process.
    """
    settings = getattr(context.module_context, "lowering_parameters", None)
    return bool(getattr(settings, "for_export", False))
