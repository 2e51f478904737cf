"""Steps of plain JAX, traced by hand, for tests of what is compiled elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.traced.traced_step import StepInput, StepResult, TracedStep


def layers(mesh, count=3, width=256, inner=512, batch=64, dtype=jnp.bfloat16, name="layers"):
    """Gradient descent of a stack of layers, as a loop; weights split along both axes."""
    data, model = mesh.axis_names

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w[0]) @ w[1], None

        x, _ = jax.lax.scan(layer, x, weights)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(first, second, x):
        value, found = jax.value_and_grad(loss)((first, second), x)
        new = [(w - 0.1 * g).astype(w.dtype) for w, g in zip((first, second), found, strict=True)]
        return value, new[1], new[0]

    shapes = ((count, width, inner), (count, inner, width), (batch, width))
    specs = ((None, data, model), (None, model, data), (data,))
    laid = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    program = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    names, roles = ("first", "second", "x"), ("parameter", "parameter", "input")
    inputs = tuple(
        StepInput(*one, np.dtype(dtype), layout)
        for *one, layout in zip(names, roles, shapes, laid, strict=True)
    )
    results = (
        StepResult("loss"),
        StepResult("second", 1, laid[1]),
        StepResult("first", 0, laid[0]),
    )
    return TracedStep(name, "jax", program, inputs, results, mesh)
