"""Loaders: what arrives and how it is split, rows that do not divide, names and options."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import DeviceError, SpecError, UnevenError
from isoshard.torch_bridge.spmd import UnevenWarning
from isoshard.torch_xla_bridge.torch_xla.distributed.parallel_loader import (
    MpDeviceLoader,
    ParallelLoader,
    PerDeviceLoader,
    PerDeviceQueue,
)
from tests.torch_xla_bridge.loaders import Source, grid_mesh, pair, part, rows


@pytest.fixture
def grid() -> xs.Mesh:
    return grid_mesh()


Point = collections.namedtuple("Point", ["x", "tag"])


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    tag: str


def test_containers_keep_their_types_and_other_things_pass():
    x, n = rows(4, 3), torch.arange(4)
    shared = rows(2)
    user = collections.UserDict(ids=n)
    ordered = collections.OrderedDict(b=x, a=n)
    batch = {
        "pair": (x, [n, "text", 3, None]),
        "point": Point(x, "p"),
        "example": Example(x, "e"),
        "user": user,
        "ordered": ordered,
        "array": np.arange(3),
        "twice": [shared, shared],
        "frozen": frozenset([1, 2]),
        "packed": torch.nn.utils.rnn.pack_sequence([rows(3, 2), rows(2, 2)]),
        "empty": torch.zeros(0, 3),
        "none": None,
    }
    batch["loop"] = [x]
    batch["loop"].append(batch["loop"])  # passed on as it is
    (got,) = MpDeviceLoader([batch], "jax")
    assert torch.equal(got["loop"][0].cpu(), x)
    assert list(got) == list(batch) and type(got) is dict
    assert type(got["pair"]) is tuple and got["pair"][1][1:] == ["text", 3, None]
    assert type(got["point"]) is Point and got["point"].tag == "p"
    assert type(got["example"]) is Example and got["example"].tag == "e"
    assert type(got["user"]) is collections.UserDict and list(got["ordered"]) == ["b", "a"]
    assert got["array"] is batch["array"] and got["frozen"] == frozenset([1, 2])
    assert got["twice"][0] is got["twice"][1] and got["none"] is None
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(got["packed"])
    want, _ = torch.nn.utils.rnn.pad_packed_sequence(batch["packed"])
    assert torch.equal(padded.cpu(), want) and lengths.tolist() == [3, 2]
    for found, host in (
        (got["pair"][0], x),
        (got["pair"][1][0], n),
        (got["point"].x, x),
        (got["example"].x, x),
        (got["user"]["ids"], n),
        (got["ordered"]["b"], x),
        (got["twice"][0], shared),
        (got["empty"], batch["empty"]),
    ):
        assert isinstance(found, xs.XLAShardedTensor) and found.dtype == host.dtype
        assert torch.equal(found.cpu(), host)
    assert user["ids"] is n and batch["example"].x is x, "the loader's own batch is unchanged"


def test_values_of_every_dtype_and_stride(grid, x64):
    host = rows(8, 6) * 3
    batch = {
        str(dtype): host.to(dtype)
        for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool)
    }
    batch["double"] = host.double()  # follows x64 in the threads too
    batch["strided"] = host.bfloat16().t().contiguous().t()
    batch["expanded"] = host[:1].expand(8, 6)
    spec = xs.ShardingSpec(grid, ("data", "model"))
    (got,) = MpDeviceLoader([batch], "jax", input_sharding=spec)
    for name, t in got.items():
        assert t.dtype == batch[name].dtype and t.sharding_spec.startswith("{devices=[4,2]0,1")
        assert torch.equal(t.cpu(), batch[name]), name


def test_a_batch_is_a_copy_and_requires_grad_as_before():
    host, leaf = rows(64, 64), rows(3).requires_grad_()
    it = iter(MpDeviceLoader([(host, leaf)], "jax"))
    got, grown = next(it)
    before = host.clone()
    host.zero_()
    got.mul_(2)
    xs.sync()
    assert torch.equal(got.cpu(), before * 2) and not host.any()
    assert grown.requires_grad and grown.is_leaf and not got.requires_grad
    grown.sum().backward()
    assert grown.grad.tolist() == [1.0] * 3


def test_tensors_made_on_the_device_by_the_loader(grid):
    def source() -> Iterator[Any]:
        for number in range(5):
            yield torch.full((4,), float(number), device="jax") * 2, rows(4)

    for number, (got, _) in enumerate(MpDeviceLoader(list(source()), "jax")):
        assert got.tolist() == [2.0 * number] * 4
    lazily = Source(5, make=lambda n: torch.full((4,), float(n), device="jax") * 2)
    assert [got[0].item() for got in MpDeviceLoader(lazily, "jax")] == [0, 2, 4, 6, 8]


# --- Layouts ------------------------------------------------------------------------------------


SPECS = [
    ("data", None),
    ("model", None),
    (("data", "model"), None),
    (("model", "data"), None),
    (None, "model"),
    ("model", "data"),
    (1, 0),
    (None, None),
]


@pytest.mark.parametrize("kind", [xs.ShardingSpec, part], ids=["whole", "minibatch"])
def test_each_device_has_its_part_as_mark_sharding_lays_it(kind, grid):
    host = rows(16, 8)
    batch = {str(spec): host for spec in SPECS}  # one tensor under several keys
    specs = {str(spec): kind(grid, spec) for spec in SPECS}
    (found,) = MpDeviceLoader([batch], "jax", input_sharding=specs)
    for spec in SPECS:
        got, want = found[str(spec)], xs.mark_sharding(host.to("jax"), grid, spec)
        xs.sync()
        assert got.sharding_spec == want.sharding_spec and got.shape == (16, 8)
        for mine, its in zip(got.local_shards, want.local_shards, strict=True):
            assert mine.indices == its.indices and mine.shard_device == its.shard_device
            whole = mine.indices is Ellipsis
            assert torch.equal(mine.data, host if whole else host[tuple(mine.indices)])


def test_specs_by_key(grid):
    batch = {"image": rows(8, 4, 2), "label": torch.arange(8), "id": torch.arange(8), "name": "b"}
    specs = {
        "image": xs.ShardingSpec(grid, ("data", None, "model")),
        "label": xs.ShardingSpec(grid, (("data", "model"),)),
        "id": None,
    }
    (got,) = MpDeviceLoader([batch], "jax", input_sharding=specs)
    assert got["image"].sharding_spec.startswith("{devices=[4,1,2]")
    assert got["label"].sharding_spec == "{devices=[8]0,1,2,3,4,5,6,7}"
    assert got["id"].sharding_spec == "" and got["name"] == "b"
    assert all(torch.equal(got[key].cpu(), batch[key]) for key in specs)


def test_specs_by_key_need_keys_and_all_of_them(grid):
    spec = xs.ShardingSpec(grid, ("data", None))
    with pytest.raises(ValueError, match=r"specs for the keys 'x', and the batch is a list"):
        next(iter(MpDeviceLoader([[rows(8, 2)]], "jax", input_sharding={"x": spec})))
    batch = {"x": rows(8, 2), "y": rows(8, 2), "z": [rows(8)], "text": "no tensor"}
    with pytest.raises(KeyError, match=r"no entry for 'y', 'z'; it has 'x'.*None for a tensor"):
        next(iter(MpDeviceLoader([batch], "jax", input_sharding={"x": spec})))


def test_tensors_of_another_rank_are_whole_with_one_warning(grid):
    batches = [(rows(8, 2), torch.arange(8), torch.tensor(3.0), rows(8, 2, 2))] * 3
    loader = MpDeviceLoader(batches, "jax", input_sharding=xs.ShardingSpec(grid, ("data", None)))
    with pytest.warns(UserWarning, match=r"shape \(8,\) has another rank.*dictionary") as caught:
        for _ in range(2):
            for x, *others in loader:
                assert x.sharding_spec.startswith("{devices=[4,1,2]")
                assert [t.sharding_spec for t in others] == ["{replicated}"] * 3
                assert torch.equal(others[0].cpu(), batches[0][1])
    assert len(caught) == 1 and caught[0].filename == __file__


def test_nothing_is_left_to_move_when_the_step_comes(grid, counted):
    host = rows(8, 4)
    (got,) = MpDeviceLoader([host], "jax", input_sharding=xs.ShardingSpec(grid, ("data", None)))
    assert len(got.local_shards) == 8 and counted("executions") == 0
    moved = counted("transfers.host_to_device")
    assert moved == 1 and counted("transfers.host_to_device_bytes") == host.nbytes
    total = (got * 2).sum()
    xs.sync()
    assert counted("transfers.host_to_device") == moved
    assert "transfers.between_devices" not in iso.metrics.counters()
    assert total.item() == pytest.approx(host.sum().item() * 2, rel=1e-4)
    assert any(t.where.startswith("test_parallel_loader.py") for t in iso.metrics.transfers())


# --- Rows that do not divide ---------------------------------------------------------------------


def ten(last: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(rows(8, 2, seed=n), torch.arange(8)) for n in range(2)] + [
        (rows(last, 2, seed=9), torch.arange(last))
    ]


def by_key(batches: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"x": x, "y": y} for x, y in batches]


def test_keep_lays_it_whole_and_says_so(grid):
    loader = MpDeviceLoader([x for x, _ in ten(5)], "jax", input_sharding=pair(grid))
    with pytest.warns(UnevenWarning, match=r"batch.*axis 0.*5.*stay whole.*last_batch") as caught:
        got = [x for _ in range(2) for x in loader]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert [x.named_sharding.spec == iso.P() for x in got] == [False, False, True] * 2
    assert len({x.sharding_spec for x in got}) == 1, "as torch_xla, which pads, calls it"
    assert torch.equal(got[2].cpu(), ten(5)[2][0])
    assert got[2].local_shards[4].unpadded_data.tolist() == ten(5)[2][0][4:].tolist()


def test_drop_leaves_out_the_last_batch_and_refuses_one_in_the_middle(grid):
    for last, sizes in ((5, [8, 8]), (8, [8, 8, 8])):
        batches = [x for x, _ in ten(last)]
        loader = MpDeviceLoader(batches, "jax", input_sharding=pair(grid), last_batch="drop")
        assert [x.shape[0] for x in loader] == sizes
    batches = [rows(8, 2), rows(6, 2), rows(8, 2)]
    it = iter(MpDeviceLoader(batches, "jax", input_sharding=pair(grid), last_batch="drop"))
    assert next(it).shape == (8, 2)
    with pytest.raises(UnevenError, match=r"6 rows does not split .* over 8.*not the last one"):
        next(it)
    assert list(it) == []


def test_pad_repeats_the_first_rows_in_all_tensors_of_the_batch(grid):
    specs = {"x": pair(grid), "y": None}
    loader = MpDeviceLoader(by_key(ten(5)), "jax", input_sharding=specs, last_batch="pad")
    last = list(loader)[2]
    x, y = ten(5)[2]
    assert torch.equal(last["x"].cpu(), torch.cat([x, x[:3]]))
    assert last["y"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2] == [*y.tolist(), 0, 1, 2]
    assert last["x"].sharding_type.name == "TILED"
    across = MpDeviceLoader(
        [rows(3, 6)],
        "jax",
        batchdim=1,
        input_sharding=xs.ShardingSpec(grid, (None, "data")),
        last_batch="pad",
    )
    assert torch.equal(next(iter(across)).cpu(), rows(3, 6)[:, [0, 1, 2, 3, 4, 5, 0, 1]])
    tiny = MpDeviceLoader([rows(3, 2)], "jax", input_sharding=pair(grid), last_batch="pad")
    assert torch.equal(next(iter(tiny)).cpu(), rows(3, 2)[torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])])


def test_another_axis_that_does_not_divide_stays_whole(grid):
    spec = xs.ShardingSpec(grid, ("data", "model"))
    loader = MpDeviceLoader([[rows(8, 3)]], "jax", input_sharding=spec)
    with pytest.warns(UnevenWarning, match=r"batch\[0\].*axis 1 .*3.*stay whole"):
        ((got,),) = loader
    assert got.named_sharding.spec == iso.P("data") and torch.equal(got.cpu(), rows(8, 3))


def test_a_part_of_a_batch_must_divide(grid):
    loader = MpDeviceLoader([rows(5, 2)], "jax", input_sharding=part(grid, ("data", None)))
    words = r"When minibatch is configured, .* shape: \(5, 2\); a batch of 5 rows does not split "
    with pytest.raises(UnevenError, match=words + "evenly over 4 shards"):  # torch_xla's words too
        next(iter(loader))
    loader = MpDeviceLoader([rows(8, 3)], "jax", input_sharding=part(grid, ("data", "model")))
    with pytest.raises(UnevenError, match=r"axis 1 has size 3 in this process, which its 2 shards"):
        next(iter(loader))


def test_the_length_counts_what_comes(grid):
    data = torch.utils.data.TensorDataset(rows(21, 2))
    for batch, drop_last, count in ((8, False, 2), (8, True, 2), (5, False, 5), (3, False, 7)):
        cpu = torch.utils.data.DataLoader(data, batch_size=batch, drop_last=drop_last)
        loader = MpDeviceLoader(cpu, "jax", input_sharding=pair(grid), last_batch="drop")
        assert len(MpDeviceLoader(cpu, "jax")) == len(cpu)
        if batch == 8:
            assert len(loader) == len(list(loader)) == len(iter(loader)) == count
        else:
            assert len(cpu) == count
    with pytest.raises(TypeError, match="len"):
        len(MpDeviceLoader(iter([]), "jax"))


# --- Names and options ---------------------------------------------------------------------------


def test_operations_run_every_so_many_batches(counted):
    executed = []
    total = torch.zeros((), device="jax")
    for x in MpDeviceLoader(Source(6), "jax", batches_per_execution=3):
        executed.append(counted("executions"))
        total = total + x.sum()
    executed.append(counted("executions"))
    # Calls 3 and 6 execute what two and three batches brought, the end what the last one did.
    assert [b - a for a, b in itertools.pairwise(executed)] == [0, 1, 0, 0, 1, 1]
    assert total.item() == 16 * 15


def test_the_parts_of_a_parallel_loader(grid):
    batches = [rows(8, 2, seed=n) for n in range(3)]
    parallel = ParallelLoader(batches, [torch.device("jax", 0)], batches_per_execution=2)
    assert parallel.batches_per_execution == 2 and parallel.per_device_samples() == 3
    it = parallel.per_device_loader("jax")
    assert isinstance(it, PerDeviceLoader) and len(it) == 3 and iter(it) is it
    assert torch.equal(it.next().cpu(), batches[0])
    assert torch.equal(parallel.next_item("jax").cpu(), batches[1])
    assert torch.equal(next(it).cpu(), batches[2])
    assert parallel.next_item("jax") is None
    with pytest.raises(StopIteration):
        it.next()
    sent = parallel.send_cpu_data_to_device([{"x": batches[0]}, batches[1]], "jax")
    assert torch.equal(sent[0]["x"].cpu(), batches[0]) and torch.equal(sent[1].cpu(), batches[1])
    dropping = ParallelLoader([], ["jax"], input_sharding=pair(grid), last_batch="drop")
    with pytest.raises(UnevenError, match="5 rows"):  # at once, nothing can be dropped
        dropping.send_cpu_data_to_device([rows(5, 2)], "jax")
    queue = PerDeviceQueue("jax", 4, 2)
    assert (queue.cpu_loader_queue.size, queue.queue.size) == (4, 2)


def test_options_are_checked_and_may_be_set_between_epochs(grid):
    for options, error, message in (
        ({"batches_per_execution": 0}, ValueError, r"batches_per_execution is at least 1"),
        ({"loader_prefetch_size": 0}, ValueError, r"loader_prefetch_size is at least 1, not 0"),
        ({"device_prefetch_size": -1}, ValueError, r"device_prefetch_size is at least 1"),
        ({"host_to_device_transfer_threads": 0}, ValueError, r"transfer_threads is at least 1"),
        ({"batchdim": -1}, ValueError, r"batchdim is at least 0, not -1"),
        ({"last_batch": "skip"}, ValueError, r"one of keep, drop, pad, not 'skip'"),
        ({"input_sharding": ("data",)}, TypeError, r"is a ShardingSpec.*not a tuple"),
    ):
        with pytest.raises(error, match=message):
            iter(MpDeviceLoader([rows(8)], "jax", **options))
    spec = xs.ShardingSpec(grid, ("data", None))
    loader = MpDeviceLoader([rows(8, 2)], "jax")
    loader._parallel_loader_kwargs["input_sharding"] = spec  # as transformers does for SPMD
    (got,) = loader
    assert got.partition_spec == iso.P("data")
    spec.partition_spec = ("batch", None)
    with pytest.raises(SpecError, match="no mesh axis is called 'batch'"):
        ParallelLoader([], ["jax"], input_sharding=spec)


def test_the_device_is_the_full_mesh():
    for device in ("jax", "xla", torch.device("jax", 0)):
        assert len(list(MpDeviceLoader([rows(2)], device))) == 1
    for device in ("cpu", "jax:1"):
        with pytest.raises(DeviceError, match=rf"uploads to jax:0, not to {device}"):
            MpDeviceLoader([], device)
    with pytest.raises(DeviceError, match=r"one device, which is the full mesh, not 2"):
        ParallelLoader([], ["jax", "jax"])
