"""Primitives of JAX: an operation of ours in a traced program, with all its rules.

>>> import jax
>>> doubled = new_primitive(
...     "doubled", lambda x: x * 2, lambda x: x, transpose=lambda slope, x: [doubled.bind(slope)]
... )
>>> jax.jit(doubled.bind)(3.0).item(), jax.grad(doubled.bind)(3.0).item()
(6.0, 2.0)

In a JAX that lacks a name which a rule needs, there is no such primitive, and `bind` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._jax_internals import jaxpr_classes, needs_devices, primitive_rules
from .private_names import or_absent

Rule = Callable[..., Any]


def new_primitive(
    name: str,
    function: Rule,
    abstract: Rule,
    *,
    eager: Rule | None = None,
    lowering: Rule | None = None,
    transpose: Rule | None = None,
    jvp: Rule | None = None,
    batch: Rule | None = None,
    named_batch: Rule | None = None,
    effects: Rule | None = None,
    several: bool = False,
    devices: bool = False,
) -> Any:
    """Make a primitive, and register its rules.

    Args:
        name: of its equations.
        function: what it computes, of arrays and its parameters, which are keywords everywhere;
            it is lowered so, unless `lowering` is given.
        abstract: the types of its results, of those of its operands.
        eager: computes it outside of transformations; by default `function`.
        lowering: `lowering(context, *operands)`, of values of MLIR.
        transpose: `transpose(cotangents, *operands)` of a primitive that is linear; None where none
            is differentiated.
        jvp: `jvp(primals, tangents)`; by default that of a linear primitive.
        batch: `batch(arrays, axes)`; by default `function` works on more axes as it is.
        named_batch: `named_batch(axis, arrays, axes)` in place of `batch`; `axis`, which `vmap`
            adds, has a `size`, a `name` and an `spmd_name`.
        effects: the effects of what its parameters hold; by default it has none.
        several: whether it has several results, in a list.
        devices: whether its lowering needs the devices of the program.

    Returns:
        The primitive. In a JAX without a name that this needs, an object whose use raises
        PrivateNameError.
    """

    def registered() -> Any:
        primitive = jaxpr_classes.Primitive(name)
        primitive.multiple_results = several
        primitive.def_impl(eager or function)
        if effects is None:
            primitive.def_abstract_eval(abstract)
        else:
            primitive.def_effectful_abstract_eval(
                lambda *types, **params: (abstract(*types, **params), effects(**params))
            )
        primitive_rules.register_lowering(
            primitive, lowering or primitive_rules.lower_fun(function, multiple_results=several)
        )
        if transpose is not None:
            primitive_rules.deflinear2(primitive, transpose)
        if jvp is not None:
            primitive_rules.jvp_rules[primitive] = jvp
        if named_batch is not None:
            primitive_rules.named_batching_rules[primitive] = named_batch
        elif batch is None:
            primitive_rules.defvectorized(primitive)
        else:
            primitive_rules.batching_rules[primitive] = batch
        if devices:
            needs_devices(primitive)
        return primitive

    return or_absent(registered)
