"""What importing `isoshard` changes of plain torch; with an old torch, and with narrow integers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import plain_cpu


@pytest.fixture(scope="module")
def found():
    """What each function of `plain_cpu.APART` returned."""
    command = [sys.executable, str(Path(plain_cpu.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_idioms_of_plain_torch_stay(found):
    without, with_it = found["idioms"], found["idioms_beside_the_bridge"]
    for name in plain_cpu.IDIOMS:
        assert with_it[name] == without[name], name
    said = {name: text.partition(":")[0] for name, (text, _) in without.items()}
    assert {name for name, kind in said.items() if kind.endswith("Error")} == {"pinned_tensor"}


def test_dynamo_finds_the_backend_by_its_name_and_the_bridge_does_not_load_dynamo(found):
    assert found["first_import"][0] is False
    assert found["backend_by_its_name"] == [True, False, True, [2.0, 2.0]]


def test_32_bits_for_integers_on_request(found):
    assert ["XLA_USE_32BIT_LONG" in said for said in found["with_narrow_integers"]] == [True, True]


def test_an_old_torch_gets_no_device_and_is_told_what_is_missing(found):
    said, there = found["with_an_old_torch"]
    assert there == ["privateuseone", [], False]
    *uses, unknown = plain_cpu.OLD_USES
    needs = (
        "isoshard.torch_bridge.mark_sharding needs",
        "isoshard.torch_bridge.jax_function needs",
        "isoshard.to_jax of a Tensor needs",
        "isoshard.sharding_of of a ReLU needs",
        "isoshard.to_t",
    )
    for use, what in zip(uses, needs, strict=True):
        assert what in said[use]
        assert "this is torch 2.9.0. Install a newer torch" in said[use]
    assert "'isoshard.torch_bridge' has no attribute 'compilee'" in said[unknown]


def test_a_checkpoint_is_loaded_where_isoshard_is_not_installed(found):
    assert found["loaded_without_the_bridge"] == {"weight": [2, 3], "bias": [2]}


def test_the_import_after_torch_installs_nothing_and_what_is_there_follows(found):
    _, refused, of_early, gradient = found["first_import"]
    attribute, module, device = refused
    assert attribute.endswith("'isoshard.torch_xla_bridge.torch_xla' has no attribute 'nothing'")
    assert module == "ModuleNotFoundError: No module named 'torch_xla'" and "xla" in device
    assert gradient == of_early == 7
