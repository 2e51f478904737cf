"""The bridge needs Flax only for Flax objects, and notices it whenever it comes."""

import subprocess
import sys

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
FLAX_FIRST = "from flax import nnx\nmesh = isoshard.make_mesh((8,), ('x',))\n"


def test_the_bridge_needs_no_flax_and_is_loaded_for_a_module_of_flax():
    """Two processes, which share what they import: pytrees, then Flax; and Flax at once."""
    code = f"{PREAMBLE}{WITHOUT_FLAX}{FLAX_LATER}{CAN_BE_SEEN}"
    other = f"{FLAX_FIRST}{FLAX_LATER}"
    fork = "import os, isoshard\nif os.fork():\n    assert os.wait()[1] == 0\n"
    program = f"{PREAMBLE}{fork}    exec({other!r})\nelse:\n    exec({code!r})\n"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
