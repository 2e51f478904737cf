"""What runs with the newest versions on each change: imports, samples, demo, JAX's internals."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from . import environments

TESTS = (
    "tests/test_readme.py",
    "tests/test_hidden_names.py",
    "tests/core/runtime/test_jax_internals.py",
    "tests/torch_bridge/test_torch_internals.py",
)
"""What meets changes of JAX and torch first: samples and private names. All: `make test-matrix`."""

_IMPORTS = """
import importlib, pkgutil, warnings
warnings.filterwarnings("error", category=DeprecationWarning, module="isoshard")
import isoshard
from isoshard.core.installation import ANNEXES, HEART
for name in (*HEART, *ANNEXES):
    room = importlib.import_module(f"isoshard.{name}")
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        if "torch_xla_backend" not in module.name:
            importlib.import_module(module.name)
"""

STEPS = {
    "imports": ("-c", _IMPORTS),
    "doctor": ("-m", "isoshard", "doctor"),
    "demo": ("-m", "isoshard", "demo", "--steps", "20"),
    "tests": ("-m", "pytest", "-p", "no:cacheprovider", *TESTS),
}
CONCURRENT = (("tests", "doctor"), ("imports", "demo"))
"""Steps one after the other, for each of two cores."""


def check(name: str) -> int:
    """Run the steps with a pair, and print how long each took.

    Args:
        name: of the pair.

    Returns:
        1 if a step failed; the others run all the same.
    """
    environments.unpacked_wheel(environments.python_of(name))
    with ThreadPoolExecutor(len(CONCURRENT)) as pool:
        return max(pool.map(lambda steps: max(_ran(name, step) for step in steps), CONCURRENT))


def _ran(name: str, step: str) -> bool:
    """Run a step, print at its end what it printed, and tell whether it failed."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        status = environments.run(name, STEPS[step], output=output)
        output.seek(0)
        took = f"{name} {step}: {status or 'ok'}, {time.perf_counter() - begun:.0f} s"
        print(f"{output.read()}{took}", flush=True)
    return bool(status)
