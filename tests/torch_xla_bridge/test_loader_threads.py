"""Loaders: the threads do their work, keep the order, report and end; parts of two processes."""

from __future__ import annotations

import collections
import gc
import os
import threading
import time
import traceback
from typing import Any

import numpy as np
import pytest
import torch

from isoshard.torch_xla_bridge.loading import upload
from isoshard.torch_xla_bridge.torch_xla.distributed.parallel_loader import (
    MpDeviceLoader,
    ParallelLoader,
)
from isoshard.torch_xla_bridge.torch_xla.utils.utils import get_free_tcp_ports
from tests import fresh
from tests.torch_xla_bridge.loaders import Source, loader_threads, rows, until


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    left = lambda: [t for t in set(threading.enumerate()) - before if "loader" in t.name]  # noqa: E731
    if left():
        gc.collect()
    until(lambda: not left())


def test_reading_and_uploading_go_on_while_a_batch_is_used(monkeypatch):
    """No clock: the consumer holds batch 0 until the threads have read and uploaded the next."""
    uploaded: dict[str, int] = collections.Counter()
    place = upload._upload

    def noted(*args: Any) -> Any:
        result = place(*args)
        assert not isinstance(result.array, np.ndarray) and result.array.is_fully_addressable
        uploaded[threading.current_thread().name] += 1
        return result

    monkeypatch.setattr(upload, "_upload", noted)
    source = Source(20)
    it = iter(MpDeviceLoader(source, "jax", loader_prefetch_size=4, device_prefetch_size=3))
    assert next(it)[0, 0].item() == 0
    until(lambda: source.read > 5 and uploaded["isoshard loader: upload"] > 3)
    assert threading.current_thread().name not in uploaded


def test_threads_wait_when_they_are_far_enough_ahead():
    source = Source(1000)
    it = iter(MpDeviceLoader(source, "jax", loader_prefetch_size=2, device_prefetch_size=3))
    until(lambda: source.read >= 5)
    time.sleep(0.1)
    assert source.read <= 2 + 3 + 2, "two queues, and one batch in the hands of each thread"
    assert next(it)[0, 0].item() == 0


def test_several_threads_keep_the_order(monkeypatch):
    place = upload._upload

    def slowly(tensor: torch.Tensor, *args: Any) -> Any:
        time.sleep(0.004 * (int(tensor[0, 0]) % 3))
        return place(tensor, *args)

    monkeypatch.setattr(upload, "_upload", slowly)
    loader = MpDeviceLoader(Source(15), "jax", host_to_device_transfer_threads=4)
    for _ in range(2):  # each iteration is an epoch
        assert [int(x[0, 0].item()) for x in loader] == list(range(15))
    until(lambda: loader_threads() == 0)


def fails_at_two(number: int) -> None:
    if number == 2:
        raise ZeroDivisionError("the disk is gone")


def test_an_error_of_the_loader_comes_in_its_place_with_its_traceback():
    with pytest.raises(TypeError, match="not iterable"):
        iter(MpDeviceLoader(3, "jax"))  # pyright: ignore[reportArgumentType]
    it = iter(MpDeviceLoader(Source(5, before=fails_at_two), "jax"))
    assert [next(it)[0, 0].item(), next(it)[0, 0].item()] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="the disk is gone") as caught:
        next(it)
    assert "fails_at_two" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert list(it) == []


def test_an_error_of_the_upload_comes_in_its_place():
    make = lambda n: rows(2).to_sparse() if n == 1 else rows(2)  # noqa: E731
    it = iter(MpDeviceLoader(Source(9, make), "jax", host_to_device_transfer_threads=3))
    assert next(it).shape == (2,)
    with pytest.raises(TypeError, match=r"cannot upload a torch\.sparse_coo tensor"):
        next(it)
    with pytest.raises(StopIteration):
        next(it)
    with pytest.raises(TypeError, match=r"cannot upload a torch\.sparse_coo tensor"):
        next(iter(MpDeviceLoader([rows(2, 2).to_sparse()], "jax")))


def test_breaking_off_ends_the_threads_and_the_loader():
    source = Source(1000)
    for batch in MpDeviceLoader(source, "jax"):
        assert batch.shape == (8, 2)
        break
    until(lambda: loader_threads() == 0 and source.closed == 1)
    loader = MpDeviceLoader(source, "jax")  # also while the loader itself lives on
    for _ in loader:
        break
    until(lambda: loader_threads() == 0 and source.closed == 2)
    assert next(iter(loader))[0, 0].item() == 0


def test_dropping_an_iterator_in_a_cycle_ends_the_threads():
    loop: list[Any] = [iter(MpDeviceLoader(Source(1000), "jax"))]
    loop.append(loop)
    next(loop[0])
    assert loader_threads() == 2
    del loop
    gc.collect()
    until(lambda: loader_threads() == 0)


def test_close_waits_for_the_threads():
    source = Source(1000)
    parallel = ParallelLoader(source, ["jax"], host_to_device_transfer_threads=3)
    it = parallel.per_device_loader("jax")
    next(it)
    assert loader_threads() == 4
    parallel.close()
    assert loader_threads() == 0 and source.closed == 1
    assert list(it) == [] and parallel.next_item("jax") is None
    parallel.close()


def test_a_new_iteration_ends_the_old_one_aloud():
    loader = MpDeviceLoader(Source(100), "jax")
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(RuntimeError, match="a new iteration of the MpDeviceLoader has begun"):
        next(first)
    assert next(second)[0, 0].item() == 0
    finished = MpDeviceLoader(Source(1), "jax")
    ended = iter(finished)
    assert len(list(ended)) == 1
    assert len(list(finished)) == 1 and list(ended) == []


PROCESS = """
import sys
import jax, numpy as np, torch
rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import isoshard as iso, isoshard.torch_bridge as xs
from isoshard.torch_xla_bridge.loading import MpDeviceLoader

whole = torch.arange(8 * 6).reshape(8, 6)
ids = np.arange(8)
# Devices 0..3 are of process 0, 4..7 of process 1.
for ids, shape, spec, mine in [
    (ids, (8, 1), ("data", None), whole[4 * rank : 4 * rank + 4]),
    (ids, (4, 2), ("data", None), whole[4 * rank : 4 * rank + 4]),
    (ids, (4, 2), ("data", "model"), whole[4 * rank : 4 * rank + 4]),
    (ids, (2, 4), (("data", "model"), None), whole[4 * rank : 4 * rank + 4]),
    (ids.reshape(2, 4).T.ravel(), (4, 2), ("data", None), whole),  # each row on both processes
    (ids.reshape(2, 4).T.ravel(), (4, 2), ("data", "model"), whole[:, 3 * rank : 3 * rank + 3]),
]:
    mesh = xs.Mesh(ids, shape, ("data", "model"))
    (got,) = MpDeviceLoader([mine], "jax", input_sharding=xs.ShardingSpec(mesh, spec, True))
    array = iso.to_jax(got)
    assert got.shape == (8, 6) == array.shape, (shape, spec, got.shape)
    assert len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
    (all_of_it,) = MpDeviceLoader([whole], "jax", input_sharding=xs.ShardingSpec(mesh, spec))
    for shard in iso.to_jax(all_of_it).addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
print("right")
"""


def test_each_of_two_processes_gives_its_part(tmp_path):
    """Meshes whose rows lie in one process, in both, and across: the parts make the whole."""
    (port,) = get_free_tcp_ports()
    program = tmp_path / "program.py"
    program.write_text(PROCESS)
    files = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = [
        fresh.start((program, str(rank), str(port)), cwd=tmp_path, env=os.environ, output=file)
        for rank, file in enumerate(files)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0], [file.read_text() for file in files]
    assert [file.read_text() for file in files] == ["right\n"] * 2
