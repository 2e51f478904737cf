import jax
import jax.numpy as jnp
import numpy as np
import optax

import isoshard as iso
from isoshard import P, Plan
from isoshard.core.runtime import serialize_virtual
from isoshard.jax_bridge import train_step


def test_a_trace_leaves_nothing_to_wait_for():
    jax.jit(lambda x: serialize_virtual.note([x]) or x)(jnp.ones(3))
    serialize_virtual.wait()


def test_deleted_results_are_not_waited_for():
    array = iso.shard(np.ones(8, np.float32), iso.make_mesh((8,), ("x",)), P("x"))
    serialize_virtual.note([array])
    array.delete()
    serialize_virtual.wait()


def test_a_training_step_waits_for_the_one_before():
    """Else eight devices on few cores stop in their collectives, and XLA ends the process."""
    mesh = iso.make_mesh((2, 4), ("data", "model"))

    def loss(params, x):
        return ((x @ params["w"]) ** 2).mean()

    step = train_step(loss, optax.sgd(1e-3), mesh, Plan({"w": P("model", None)}))
    state = step.init(lambda: {"w": jnp.ones((64, 64))})
    x = iso.shard(np.ones((64, 64), np.float32), mesh, P("data"))
    state, last = step(state, x)
    program, ready = step._program, []

    def watched(state):
        return lambda *given: (ready.append(last.is_ready()), program(state)(*given))[1]

    step._program = watched
    for _ in range(5):
        state, last = step(state, x)
    assert ready == [True] * 5
