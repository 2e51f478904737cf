"""Loaders: what arrives, and how it is split."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.torch_xla.distributed.parallel_loader import (
    MpDeviceLoader,
)
from tests.torch_bridge.torch_xla.loaders import (
    Source,
    grid_mesh,
    part,
    rows,
)


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
    (got,) = MpDeviceLoader([batch], "jax")
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


def test_something_that_contains_itself_is_passed_on():
    loop: list[Any] = [rows(2)]
    loop.append(loop)
    (got,) = MpDeviceLoader([loop], "jax")
    assert torch.equal(got[0].cpu(), loop[0])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("how", ["contiguous", "strided", "expanded"])
def test_values_of_every_dtype_and_stride(dtype, how, grid):
    host = (rows(8, 6) * 3).to(dtype)
    host = {
        "contiguous": host,
        "strided": host.t().contiguous().t(),
        "expanded": host[:1].expand(8, 6),
    }[how]
    spec = xs.ShardingSpec(grid, ("data", "model"))
    (got,) = MpDeviceLoader([host], "jax", input_sharding=spec)
    assert got.dtype == dtype and got.sharding_spec.startswith("{devices=[4,2]0,1")
    assert torch.equal(got.cpu(), host)


def test_float64_follows_x64_in_the_threads_too(x64):
    host = rows(4, 2).double()
    (got,) = MpDeviceLoader(
        [
            host,
        ][:1],
        "jax",
    )
    assert got.dtype == torch.float64 and torch.equal(got.cpu(), host)


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


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", [xs.ShardingSpec, part], ids=["whole", "minibatch"])
def test_each_device_has_its_part_as_mark_sharding_lays_it(spec, kind, grid):
    host = rows(16, 8)
    (got,) = MpDeviceLoader([host], "jax", input_sharding=kind(grid, spec))
    want = xs.mark_sharding(host.to("jax"), grid, spec)
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


def test_one_tensor_under_two_keys_with_two_specs(grid):
    host = rows(8, 8)
    specs = {
        "a": xs.ShardingSpec(grid, ("data", None)),
        "b": xs.ShardingSpec(grid, (None, "data")),
    }
    (got,) = MpDeviceLoader([{"a": host, "b": host}], "jax", input_sharding=specs)
    assert got["a"].partition_spec == iso.P("data") and got["b"].partition_spec[1] == "data"


def test_specs_by_key_need_keys_and_all_of_them(grid):
    spec = xs.ShardingSpec(grid, ("data", None))
    with pytest.raises(ValueError, match=r"specs for the keys 'x', and the batch is a list"):
        next(iter(MpDeviceLoader([[rows(8, 2)]], "jax", input_sharding={"x": spec})))
    batch = {"x": rows(8, 2), "y": rows(8, 2), "z": [rows(8)], "text": "no tensor"}
    with pytest.raises(KeyError, match=r"no entry for 'y', 'z'; it has 'x'.*None for what stays"):
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


def test_a_compiled_step_trains_from_a_loader(grid):
    batches = [rows(8, 4, seed=n) for n in range(6)]
    spec = xs.ShardingSpec(grid, ("data", None))

    def train(loader: Iterable[torch.Tensor], device: str, wrap: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        return [loss.item() for loss in [step(x) for x in loader]]

    want = train(batches, "cpu", lambda step: step)
    for wrap in (lambda step: step, xs.compile):
        got = train(MpDeviceLoader(batches, "jax", input_sharding=spec), "jax", wrap)
        assert got == pytest.approx(want, rel=1e-4)
