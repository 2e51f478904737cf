"""Samples of the database as programs for platforms that are not here."""

import jax
import pytest
from jax import export

from isoshard.torch_bridge.engine.subprograms import off_cpu
from tests.aot import collecting
from tests.conformance import entry
from tests.conformance.columns import COLUMNS
from tests.conformance.database import entries


def _attempts(name, column="forward"):
    found = entry.attempts_of(entries()[name], COLUMNS[column], collecting.SAMPLES["cuda"])
    assert not isinstance(found, str)
    return found


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_all_samples_are_one_program(platform, tmp_path):
    attempts = [*_attempts("add"), *_attempts("add", "int64")]
    plans = collecting.recorded(entries()["add"], attempts, platform)
    assert len(plans) == 1
    found = collecting.exported("add", ("forward", "int64"), platform, plans[0], tmp_path)
    assert found.reason == ""
    with jax.enable_x64(True):
        program = export.deserialize(bytearray((tmp_path / found.file).read_bytes()))
    assert program.platforms == (platform,)
    assert len(program.out_avals) == len(attempts)


def test_what_the_host_computes_is_known():
    attempts = _attempts("linalg.eigvals")
    collecting.recorded(entries()["linalg.eigvals"], attempts, "tpu")
    assert all(one.host for one in attempts)
    assert off_cpu.platform() == "cpu"


def test_what_cannot_be_lowered_has_a_reason(tmp_path, monkeypatch):
    plans = collecting.recorded(entries()["add"], _attempts("add"), "tpu")

    def refuses(*_, **__):
        raise NotImplementedError("no rule for it\nanywhere")

    monkeypatch.setattr(export, "export", refuses)
    found = collecting.exported("add", ("forward",), "tpu", plans[0], tmp_path)
    assert (found.file, found.reason) == ("", "NotImplementedError: no rule for it anywhere")
