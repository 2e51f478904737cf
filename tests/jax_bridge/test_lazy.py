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
FLAX_FIRST = "from flax import nnx\n"


def _run(code):
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pytrees_need_no_flax():
    _run(WITHOUT_FLAX)


def test_this_test_can_fail():
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + "import flax\n" + WITHOUT_FLAX],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "flax was imported" in done.stderr


def test_flax_may_come_after_the_bridge():
    _run(WITHOUT_FLAX + FLAX_LATER)


def test_the_facade_loads_the_bridge_for_a_module():
    _run(FLAX_FIRST + "import isoshard\nmesh = isoshard.make_mesh((8,), ('x',))\n" + FLAX_LATER)
