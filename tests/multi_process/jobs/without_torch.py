"""A run where torch is not installed: JAX alone, started by torchrun's variables."""

import sys

sys.modules["torch"] = None  # as if it were not installed

import isoshard as iso  # noqa: E402


def start():
    found = iso.distributed.init_distributed(timeout=60)
    assert found.launcher == "torchrun"


def check_jax_computes_over_all(world):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    assert (jax.process_index(), jax.process_count()) == (world.rank, world.size)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    mine = jax.device_put(np.full(1, world.rank + 1, np.float32), jax.local_devices()[0])
    sharding = jax.NamedSharding(mesh, P("x"))
    whole = jax.make_array_from_single_device_arrays((world.size,), sharding, [mine])
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, P()))(whole)
    assert float(total.addressable_data(0)) == world.size * (world.size + 1) / 2
    assert sys.modules["torch"] is None
