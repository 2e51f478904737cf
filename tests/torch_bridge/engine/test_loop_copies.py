"""What loops over layers copy; which program has loops is tested with `repeat=`."""

import jax
import jax.numpy as jnp

from isoshard.core.repeats.rolled_program import rolled
from isoshard.torch_bridge.engine.compiling.loop_copies import loop_copies


def test_stacks_that_are_made_of_single_arrays_or_taken_apart_are_copied():
    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight) * 2.0 + 1.0
        return x.sum()

    found = rolled(jax.make_jaxpr(jax.grad(loss))([jnp.ones((64, 64))] * 6, jnp.ones((16, 64))))
    given, taken = (
        {stack.indices: 4 * 2 * variable.aval.size for stack, variable in pairs if stack.stacked}
        for pairs in (
            zip(found.inputs, found.program.jaxpr.invars, strict=True),
            zip(found.results, found.program.jaxpr.outvars, strict=True),
        )
    )
    assert given and taken
    in_loops = loop_copies(found, given, taken).copied
    assert in_loops > 0
    assert loop_copies(found, (), taken).copied == in_loops + sum(given.values())
    assert loop_copies(found, given, ()).copied == in_loops + sum(taken.values())


def test_a_layer_that_a_loop_cuts_out_of_its_stack_itself_is_copied():
    def layers(weights, x):
        def layer(x, number):
            weight = jax.lax.dynamic_slice(weights, (number, 0, 0), (1, 64, 64))
            return x @ weight.reshape(64, 64), None

        return jax.lax.scan(layer, x, jnp.arange(6))[0]

    weights = jnp.ones((6, 64, 64))
    found = rolled(jax.make_jaxpr(layers)(weights, jnp.ones((16, 64))))
    assert loop_copies(found).copied == 2 * weights.nbytes  # read, and written beside
