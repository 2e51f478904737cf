import jax
import numpy as np
import pytest

from isoshard.core import frameworks
from isoshard.core.frameworks import Framework, framework_of, on_first, register, require


class Box:
    """Stands for a class of a framework; tests move it to a package of their own."""


class Boxes(Framework):
    name = "boxlib"

    def owns(self, obj):
        return isinstance(obj, Box)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """A registry without bridges, put back as it was afterwards."""
    monkeypatch.setattr(frameworks, "_frameworks", {})
    monkeypatch.setattr(frameworks, "_loaders", {})
    monkeypatch.setattr(Box, "__module__", "boxlib.boxes.square")


def test_the_loader_runs_once_at_the_first_object_of_its_package():
    loads = []

    def load():
        loads.append("boxlib")
        register(Boxes())

    on_first("boxlib", load)
    assert framework_of(np.zeros(2)) is None
    assert framework_of({"a": 2}) is None
    assert loads == []
    for _ in range(2):
        assert framework_of(Box()).name == "boxlib"
    assert loads == ["boxlib"]
    assert framework_of(type("Mine", (Box,), {"__module__": "elsewhere"})()).name == "boxlib"
    for obj in (np.zeros(2), jax.numpy.zeros(2), {"a": 1}, [1], None, 3):
        assert framework_of(obj) is None


def test_a_bridge_may_load_in_two_steps():
    on_first("boxlib", lambda: on_first("boxlib", lambda: register(Boxes())))
    assert require("boxlib").owns(Box())


def test_a_framework_that_is_not_installed():
    def load():
        raise ModuleNotFoundError("No module named 'boxlib'", name="boxlib")

    on_first("boxlib", load)
    for _ in range(2):  # asking again says it again
        with pytest.raises(ImportError, match="boxlib is not installed; get it with pip"):
            require("boxlib")


def test_a_framework_nobody_knows():
    with pytest.raises(ImportError, match=r"'fortran'; the known ones are 'flax', 'onnx', 'torch'"):
        require("fortran")


def test_a_broken_bridge_is_not_hidden():
    def load():
        raise ModuleNotFoundError("No module named 'helper'", name="helper")

    on_first("boxlib", load)
    with pytest.raises(ModuleNotFoundError, match="No module named 'helper'"):
        framework_of(Box())
    with pytest.raises(ModuleNotFoundError, match="No module named 'helper'"):
        require("boxlib")


def test_a_missing_verb_says_so():
    for verb, *arguments in (
        ("shard", None, None),
        ("reshard", None, None),
        *((verb,) for verb in ("full", "sharding_of", "local_shards", "to_jax", "from_jax")),
        ("shard_from_jax",),
    ):
        with pytest.raises(
            TypeError, match=f"{verb} is not implemented for boxlib objects such as Box"
        ):
            getattr(Boxes(), verb)(Box(), *arguments)
