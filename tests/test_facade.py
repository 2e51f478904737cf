"""What `import isoshard` does, and what it leaves alone."""

import subprocess
import sys

import pytest

import isoshard
from isoshard import core

REPORT = """
import sys
import jax
before = dict(jax.config.values)
{program}
heavy = {{"torch", "flax", "onnx", "optax", "matplotlib"}} & set(sys.modules)
changed = [name for name, value in before.items() if jax.config.values[name] != value]
started = jax.config.update("jax_num_cpu_devices", 3)
print(sorted(heavy), changed)
"""


def run(program):
    """What a new process loaded and changed, or its error; a started backend is an error."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(program=program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.strip() or done.stderr


def test_a_started_backend_is_found():
    assert "before backends are initialized" in run("jax.devices()")


def test_importing_loads_no_framework_and_no_part_and_changes_nothing():
    """Nor Pallas, which `jax.extend` brings: a third of what the import would take."""
    parts = {"isoshard.core.weights", "isoshard.core.data", "isoshard.domain", "jax.extend"}
    parts |= {"isoshard.planner", "isoshard.core.checkpoint", "jax._src.pallas"}
    program = f"import isoshard; print(sorted({parts!r} & set(sys.modules)))"
    assert run(program) == "[]\n[] []"
    more = "isoshard.weights; import onnx; jax.config.update('jax_enable_x64', True);"
    found = run(program.replace("isoshard;", f"isoshard; {more}"))
    assert "core.weights" in found and found.endswith("['onnx'] ['jax_enable_x64']")


def test_core_verbs_on_arrays_load_no_framework():
    program = (
        "import isoshard as iso, numpy as np\n"
        "a = iso.shard({'w': np.ones((2, 2), np.float32)}, iso.make_mesh((1,), ('x',)), None)\n"
        "iso.visualize(a); iso.full(a); iso.sharding_of(a); iso.to_jax(a)\n"
        "print([name for name in ('torch', 'flax') if name in sys.modules]); sys.exit()"
    )
    assert run(program) == "[]"


@pytest.mark.parametrize("name", isoshard.__all__)
def test_every_public_name_is_there(name):
    assert getattr(isoshard, name) is not None


def test_every_name_of_core_is_the_same_object_here():
    assert set(core.__all__) < set(isoshard.__all__)
    assert all(getattr(isoshard, name) is getattr(core, name) for name in core.__all__)
    assert isoshard.metrics.__name__ == "isoshard.metrics"


def test_names_are_listed_and_unknown_ones_refused():
    assert dir(isoshard) == sorted(set(isoshard.__all__))
    with pytest.raises(AttributeError, match="'isoshard' has no attribute 'shrad'"):
        _ = isoshard.shrad
