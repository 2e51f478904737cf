"""In a process of torch 2.9: nothing is registered, and what cannot work says why."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

import isoshard
from isoshard.torch_xla_bridge import torch_xla_backend as backend


def run(program):
    """What a new process prints, or its error."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    return done.stdout.strip() or done.stderr


def test_importing_isoshard_loads_neither_torch():
    assert run("import sys, isoshard; print({'torch', 'torch_xla'} & set(sys.modules))") == "set()"


def test_the_backend_loads_torch_xla_when_it_is_used():
    program = (
        "import sys, torch\n"
        "from isoshard.torch_bridge import torch_xla_backend as backend\n"
        "name = torch._C._get_privateuse1_backend_name()\n"
        "print(name, 'torch_xla' in sys.modules, 'isoshard.torch_bridge.engine' in sys.modules)\n"
        "backend.mesh_to_torch_xla(__import__('isoshard').make_mesh((1,), ('x',)))\n"
        "print('torch_xla' in sys.modules)"
    )
    assert run(program).splitlines()[-2:] == ["privateuseone False False", "True"]


def test_the_names_of_the_bridge_say_what_they_need():
    import isoshard.torch_bridge as xs

    with pytest.raises(ImportError, match=r"torch_bridge.mark_sharding needs .* torch >= 2.10"):
        _ = xs.mark_sharding
    with pytest.raises(AttributeError, match="no attribute 'mark_shrading'"):
        _ = xs.mark_shrading


def test_verbs_of_core_serve_tensors_of_torch_xla_and_refuse_others(mesh):
    tensor = torch.arange(4.0).to("xla")
    array = isoshard.to_jax({"w": tensor}, copy=False)["w"]
    np.testing.assert_array_equal(array, np.arange(4.0))
    assert isoshard.to_torch(array).device.type == "xla"
    assert isoshard.sharding_of(tensor) == backend.sharding_of(tensor)
    for refused in (
        lambda: isoshard.to_jax(torch.ones(3)),
        lambda: isoshard.sharding_of(torch.nn.Linear(2, 2)),
        lambda: isoshard.shard(torch.ones(8), mesh, isoshard.P("x")),
        lambda: isoshard.shard({"w": tensor}, mesh, isoshard.P("x")),
        lambda: isoshard.local_shards(jax.numpy.ones(3), framework="torch"),
    ):
        with pytest.raises(ImportError, match=r"torch >= 2.10; this is torch 2.9"):
            refused()


def test_unloaded_the_backend_is_named_in_the_refusal():
    program = "import torch, isoshard; isoshard.to_jax(torch.ones(3))"
    assert "use isoshard.torch_xla_bridge.torch_xla_backend" in run(program)
