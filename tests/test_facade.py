"""What `import isoshard` does, and what it leaves alone."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import isoshard
from isoshard import core, metrics

STABILITY = (Path(__file__).resolve().parents[1] / "docs" / "api_stability.md").read_text()

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


MODULES = ("isoshard", "isoshard.torch_bridge", "isoshard.jax_bridge", "isoshard.onnx_bridge")
MODULES += tuple(
    f"isoshard.{name}"
    for name in ("checkpoint", "data", "distributed", "errors", "metrics", "planner", "rules")
)
MODULES += ("isoshard.sharding", "isoshard.weights", "isoshard.domain")
MODULES += ("isoshard.torch_bridge.serving",)
"""What users import, or name in `isoshard`."""


@pytest.mark.parametrize("name", MODULES)
def test_what_is_listed_is_public_and_there(name):
    """`dir` is `__all__`: no module that was imported on the way, no `Any`."""
    module = importlib.import_module(name)
    assert dir(module) == sorted(set(module.__all__)) == sorted(module.__all__)
    assert all(getattr(module, one) is not None for one in module.__all__)


def test_every_module_of_the_facade_is_among_them():
    found = [getattr(isoshard, name) for name in isoshard.__all__]
    assert {one.__name__ for one in found if inspect.ismodule(one)} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_the_page_on_stability_lists_the_public_names(name):
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*\| ([^|]+) \|$", STABILITY, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == sorted(importlib.import_module(name).__all__)


def test_bridges_are_named_and_not_listed():
    assert not {"torch_bridge", "jax_bridge"} & set(dir(isoshard))
    assert isoshard.torch_bridge.__name__ == "isoshard.torch_bridge"
    assert isoshard.jax_bridge.__name__ == "isoshard.jax_bridge"


def test_every_name_of_core_is_the_same_object_here():
    assert set(core.__all__) < set(isoshard.__all__)
    assert all(getattr(isoshard, name) is getattr(core, name) for name in core.__all__)


def test_unknown_names_are_refused():
    with pytest.raises(
        AttributeError, match=r"'isoshard' has no attribute 'shrad'.*isoshard.shard"
    ):
        _ = isoshard.shrad


@pytest.mark.parametrize("name", isoshard._MOVED)
def test_a_name_that_moved_warns_and_is_the_same_object(name):
    home = isoshard._MOVED[name]
    said = rf"^isoshard\.{name} is now {home}\.{name}; the old form will be removed"
    with pytest.warns(DeprecationWarning, match=said) as caught:
        old = getattr(isoshard, name)
    assert old is getattr(importlib.import_module(home), name)
    assert caught[0].filename == __file__
    assert name in importlib.import_module(home).__all__ and name not in isoshard.__all__


@pytest.mark.parametrize("name", metrics._MOVED)
def test_counters_are_written_by_isoshard_alone(name):
    with pytest.warns(DeprecationWarning, match=rf"^isoshard\.metrics\.{name} is now"):
        assert getattr(metrics, name) is not None


def test_importing_a_name_that_moved_warns():
    with pytest.warns(DeprecationWarning, match=r"isoshard\.rules\.Linear"):
        from isoshard import Linear
    assert Linear is isoshard.rules.Linear
