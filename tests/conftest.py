"""Eight virtual CPU devices for every test, set before JAX's backend starts.

A test runs its programs once or twice, so LLVM is told not to work hard on them, and XLA to write
its kernels without MLIR and in one piece (a third less processor time for small programs), and JAX
to give an operation its own line and not the stack (a tenth less); XLA's own passes, the
partitioner among them, are those of users. `JAX_DISABLE_MOST_OPTIMIZATIONS=0 make
test` runs the code of users; `make conformance` does without `--quick`.
"""

import gc
import os
import sys

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

import isoshard
from isoshard.core.layout.mesh import hybrid_mesh, make_mesh
from tests.fresh import share
from tests.host import collect_rarely, seed_the_cpu_alone, use_recorded_rates
from tools.harness.xla_flags import quick_variables

DEVICES = 8

os.environ.setdefault("ISOSHARD_COMPILATION_CACHE", "0")  # tests count what is compiled
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's idle threads spin, beside eight devices
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = quick_variables(jax.__version__, flags)["XLA_FLAGS"]

collect_rarely()

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # a core of its own, and XLA's threads with it
    shares = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[int(worker[2:]) :: shares] or cores)

use_recorded_rates()

if jax.__version_info__ < (0, 10):  # prints "PartitionSpec('x')" where later ones print "P('x')"
    long = PartitionSpec.__repr__
    PartitionSpec.__repr__ = lambda spec: long(spec).replace("PartitionSpec", "P", 1)

# AXIS_TYPES=Explicit runs the tests on meshes as `jax.make_mesh` makes them.
for make in (make_mesh, hybrid_mesh):
    make.__kwdefaults__["axis_types"] = AxisType[os.environ.get("AXIS_TYPES", "Auto")]


def pytest_configure(config):
    """With several workers, one server for the programs that need a process of their own."""
    if getattr(config.option, "numprocesses", None) and "workerinput" not in vars(config):
        share()


def pytest_sessionstart(session):
    """Fail the run, rather than skip tests, if the devices are not there."""
    devices = jax.devices()
    if len(devices) != DEVICES or devices[0].platform != "cpu":
        raise pytest.UsageError(
            f"the tests need {DEVICES} virtual CPU devices, and JAX runs on {devices}: something "
            "started its backend before tests/conftest.py"
        )


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays():
    """Keep what earlier modules left out of later garbage collections, which get slow otherwise.

    A process of the suite ends with millions of objects, most of them of compiled programs. Those
    are dropped between modules, before the engine would drop them within a test that counts them.
    """
    program = sys.modules.get("isoshard.torch_bridge.engine.compiling.program")
    if program is not None and program._is_crowded(0.3):
        isoshard.metrics.clear_caches()
    gc.collect()
    gc.freeze()
    seed_the_cpu_alone()


@pytest.fixture(autouse=True)
def _same_numbers_each_run():
    """What a test draws without a generator of its own is the same in every run and order."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.fixture
def mesh():
    """The mesh most tests use: 2 x 4, axes "x" and "y"."""
    return make_mesh((2, 4), ("x", "y"))


@pytest.fixture
def counted():
    """Metrics counted from zero; call it to read one counter."""
    from isoshard.core.runtime import metrics

    metrics.reset()
    yield lambda name: metrics.counters()[name]
    metrics.reset()


@pytest.fixture
def x64():
    """64-bit types for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_promotion():
    """No implicit dtype promotion in jax.numpy for one test."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def stacks():
    """Programs that know the stack of each operation, as those of users do."""
    before = jax.config.jax_include_full_tracebacks_in_locations
    jax.config.update("jax_include_full_tracebacks_in_locations", True)
    yield
    jax.config.update("jax_include_full_tracebacks_in_locations", before)
