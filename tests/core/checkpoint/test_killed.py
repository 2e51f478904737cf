"""Killed at any moment the older checkpoint survives; whatever is damaged is noticed."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import isoshard as iso
from isoshard.core.checkpoint import zarr_format
from isoshard.core.checkpoint.store import LocalStore
from isoshard.core.errors import CheckpointError

OPERATIONS = ("make_folder", "writing", "rename", "remove", "remove_folder", "sync_folder")


class Killed(BaseException):
    """Stands for the end of the process: nothing is done afterwards, not even cleaning up."""


class Death:
    """Lets some operations through; from then on each one raises `Killed`."""

    def __init__(self, monkeypatch, survived):
        self.left = survived
        self.log = []
        for name in OPERATIONS:
            monkeypatch.setattr(LocalStore, name, self._mortal(name, getattr(LocalStore, name)))
        monkeypatch.setattr(
            zarr_format, "write_arrays", self._mortal("zarr", zarr_format.write_arrays, half=True)
        )

    def _mortal(self, name, real, half=False):
        def call(*args, **kwargs):
            self.log.append(name)
            self.left -= 1
            if self.left == 0 and half:  # some arrays are there, and half of a file
                real(args[0], dict([*args[1].items()][:1]), **kwargs)
                file = Path(args[0], next(iter(args[1])), "c.0.0")
                os.truncate(file, file.stat().st_size // 2)
            if self.left == 0 and name == "writing":
                return self._half(real(*args, **kwargs))
            if self.left <= 0:
                raise Killed(name)
            return real(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _half(self, writing):
        with writing as file:
            file.write(b"{")
            raise Killed("in the middle of a file")


def tree(number):
    rng = np.random.default_rng(number)
    return {"w": rng.random((64, 64)), "v": rng.random((128, 8)), "b": rng.random(4), "n": number}


def check(found):
    wanted = tree(found["n"])
    assert all(
        np.asarray(found[name]).tobytes() == np.asarray(a).tobytes() for name, a in wanted.items()
    )
    return found["n"]


def in_blocks(tree):
    """The same with arrays in blocks of unequal sizes, which end in the middle of files."""
    mesh = iso.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    sizes = {"w": (1, 20, 0, 43), "v": (5, 60, 60, 3), "b": (0, 1, 3, 0)}
    laid = {
        name: iso.shard(tree[name], mesh, ("x",), uneven="pad", sizes={0: given})
        for name, given in sizes.items()
    }
    return {**tree, **laid}


@pytest.mark.parametrize(("laid", "step"), [(dict, 1), (in_blocks, 0)], ids=["next", "same"])
def test_at_every_operation(tmp_path, monkeypatch, x64, laid, step):
    results = []
    survived = 0
    start = tmp_path / "start"
    iso.save(start, laid(tree(1)))
    second, third = laid(tree(2)), laid(tree(3))
    while results[-1:] != ["done"]:
        survived += 1
        folder = tmp_path / str(survived)
        shutil.copytree(start, folder)
        with monkeypatch.context() as patched:
            death = Death(patched, survived)
            try:
                iso.save(folder, second, step=step, keep=1)
                results.append("done")
            except Killed:
                results.append("killed")
        assert check(iso.restore(folder, tree(0))) in (1, 2)
        iso.save(folder, third, step=step, keep=1)  # the next save cleans up
        assert check(iso.restore(folder, tree(0))) == 3
        assert [path.name for path in folder.iterdir()] == [str(step)]
    assert results.count("killed") > 12
    assert {"zarr", "writing", "rename", "sync_folder"} <= set(death.log)
    commit = death.log.index("rename")
    assert {"writing", "zarr"}.isdisjoint(death.log[commit:])  # all is written before the commit


CHILD = """
import os, sys, jax
jax.config.update("jax_platforms", "cpu")
import isoshard as iso
from tests.core.checkpoint.test_killed import big
number = 0
while True:
    if pid := os.fork():
        os.waitpid(pid, 0)
        print("killed", flush=True)
        number = int(sys.stdin.readline())
        continue
    print("ready", os.getpid(), flush=True)
    while True:
        number += 1
        saving = iso.save(sys.argv[1], big(number), asynchronous=number % 2 == 0)
        saving.wait()
        print(number, flush=True)
"""


def big(number):
    return {f"w{i}": np.full((512, 256), number + i, np.float32) for i in range(24)} | {"n": number}


def test_killed_processes(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as child:
        try:
            for _ in range(2):
                ready, pid = child.stdout.readline().split()
                assert ready == "ready"
                done = [int(child.stdout.readline())]
                time.sleep(random.uniform(0, 0.3))
                os.kill(int(pid), signal.SIGKILL)
                while (line := child.stdout.readline()) != "killed\n":
                    done.append(int(line))
                found = iso.restore(tmp_path, big(0))
                assert found["n"] in (done[-1], done[-1] + 1)
                assert all((found[f"w{i}"] == found["n"] + i).all() for i in range(24))
                child.stdin.write(f"{found['n']}\n")
                child.stdin.flush()
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def outcome(folder, like):
    """What a restore of something damaged gives."""
    try:
        return check(iso.restore(folder, like))
    except CheckpointError as error:
        return str(error)


def test_every_damaged_file_is_noticed(tmp_path):
    iso.save(tmp_path, tree(1))
    files = [path for path in (tmp_path / "0").rglob("*") if path.is_file()]
    files = {path.name: path for path in files}  # one of each kind
    assert set(files) == {".manifest", "tree.json", "zarr.json", "c.0.0"}
    for path in files.values():
        whole = path.read_bytes()
        for size in (0, len(whole) - 1):
            path.write_bytes(whole[:size])
            assert str(path) in outcome(tmp_path, tree(0)), (path, size)
        path.write_bytes(whole + b" ")
        assert str(path) in outcome(tmp_path, tree(0))
        path.unlink()
        told = outcome(tmp_path, tree(0))
        assert str(path) in told or (path.name == ".manifest" and "no checkpoint at" in told)
        path.write_bytes(whole)
    assert outcome(tmp_path, tree(0)) == 1


def test_every_altered_byte_is_noticed(tmp_path):
    iso.save(tmp_path, tree(1))
    rng = random.Random(0)
    for path in (path for path in (tmp_path / "0").rglob("*") if path.is_file()):
        whole = path.read_bytes()
        for place in rng.sample(range(len(whole)), min(20, len(whole))):
            changed = bytearray(whole)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            found = outcome(tmp_path, tree(0))
            if path.name == "zarr.json":  # for other libraries; not read here
                assert found == 1
            else:
                assert str(path.parent) in found, (path, place)
        path.write_bytes(whole)


def test_a_damaged_checkpoint_names_the_others(tmp_path):
    iso.save(tmp_path, tree(1), step=10)
    iso.save(tmp_path, tree(2), step=20)
    (tmp_path / "20" / "tree.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"damaged.*tree\.json has 2.*other steps: 10\."):
        iso.restore(tmp_path, tree(0))
    assert check(iso.restore(tmp_path, tree(0), step=10)) == 1
    (tmp_path / "20" / ".manifest").write_text("")
    with pytest.raises(CheckpointError, match=r"\.manifest was truncated"):
        iso.restore(tmp_path, tree(0))
    (tmp_path / "20" / ".manifest").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete checkpoint.*other steps: 10\."):
        iso.restore(tmp_path / "20", tree(0))
    assert check(iso.restore(tmp_path, tree(0))) == 1
