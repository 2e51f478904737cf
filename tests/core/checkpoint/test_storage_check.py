"""A full or slow disk is an error before the training that it would cost."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import isoshard as iso
from tests import fresh


def test_what_is_needed_and_free(tmp_path):
    found = iso.checkpoint.check_storage(tmp_path / "run", 10**6, keep=3)
    assert found.needed == 4 * 10**6
    assert found.free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert found.rate > 0
    assert [*(tmp_path / "run").iterdir()] == []


def test_checkpoints_that_are_there_count(tmp_path):
    content = {"w": np.random.default_rng(0).standard_normal(250_000, np.float32)}  # 1 MB
    for step in (1, 2):
        iso.save(tmp_path, content, step=step, keep=2)
    there = iso.checkpoint.check_storage(tmp_path, 10**6, keep=2).needed
    assert 10**6 <= there < 1.2 * 10**6  # one more, and not three
    assert iso.checkpoint.check_storage(tmp_path, 10**7, keep=2).needed > 2.7 * 10**7


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_900_000))
    told = (
        r"does not fit this run: 3 checkpoints of 976.6 KiB \(keep=2, .*\) need 2.9 MiB, and "
        "2.8 MiB are "
        "free there. Free some, or give another folder or a smaller keep"
    )
    with pytest.raises(iso.CheckpointError, match=told):
        iso.checkpoint.check_storage(tmp_path, 10**6)
    assert iso.checkpoint.check_storage(tmp_path, 10**6, keep=1).needed == 2 * 10**6


def test_a_disk_that_is_too_slow(tmp_path):
    with pytest.raises(iso.CheckpointError, match=r"would take .* s from one process, .*seconds="):
        iso.checkpoint.check_storage(tmp_path, 10**6, seconds=1e-9)
    assert iso.checkpoint.check_storage(tmp_path, 10**6, seconds=600).rate


KILLED = """
import os, sys
from isoshard.core.checkpoint import storage_check
storage_check._wait_for_probe = lambda *given: os._exit(9)
storage_check.check_storage(sys.argv[1], 1000)
"""


def test_what_a_killed_check_leaves_goes_with_the_next_save(tmp_path):
    folder = tmp_path / "checkpoints"
    done = fresh.run(KILLED, [str(folder)], cwd=tmp_path)
    assert done.returncode == 9
    assert [path.name.startswith(".saving-") for path in folder.iterdir()] == [True]
    iso.save(folder, {"n": 1}, step=1)
    assert [path.name for path in folder.iterdir()] == ["1"]


def test_keeping_all_is_no_size(tmp_path):
    with pytest.raises(ValueError, match="keep=0 keeps every checkpoint"):
        iso.checkpoint.check_storage(Path(tmp_path), 10, keep=0)
