"""The bridge needs Flax only for Flax objects, and notices it whenever it comes."""

from tests import fresh

PREAMBLE = """
import sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
"""
WITHOUT_FLAX = """
import isoshard
from isoshard.jax_bridge import create_sharded
mesh = isoshard.make_mesh((8,), ("x",))
made = create_sharded(lambda: {"w": jax.numpy.ones(8)}, mesh, isoshard.P("x"))
assert made["w"].sharding.spec == isoshard.P("x")
isoshard.shard({"w": np.ones(8, np.float32)}, mesh, isoshard.Plan({"w": isoshard.P("x")}))
assert not {"flax", "optax"} & set(sys.modules), "flax was imported"
"""
FLAX_LATER = """
from flax import nnx
linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
assert isoshard.shard(linear, mesh, isoshard.Plan({"kernel": isoshard.P("x")})) is linear
assert isoshard.sharding_of(linear)["kernel"].spec == isoshard.P("x")
"""
CAN_BE_SEEN = 'assert {"flax", "optax"} & set(sys.modules)\n'


def test_the_bridge_needs_no_flax_and_is_loaded_for_a_module_of_flax(tmp_path):
    """Pytrees, and then Flax."""
    first = fresh.run(f"{PREAMBLE}{WITHOUT_FLAX}{FLAX_LATER}{CAN_BE_SEEN}", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
