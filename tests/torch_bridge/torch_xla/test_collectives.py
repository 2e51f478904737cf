"""Collectives between replicas, where there is one."""

from __future__ import annotations

import pytest
import torch

from isoshard.torch_bridge.torch_xla.core import xla_model as xm


@pytest.fixture
def x():
    return torch.arange(8.0).to("jax")


def same(got, want):
    assert got.device.type == "jax" and got is not want
    torch.testing.assert_close(got.cpu(), want.cpu())


def test_all_reduce(x):
    same(xm.all_reduce(xm.REDUCE_SUM, x), x)
    same(xm.all_reduce(xm.REDUCE_MAX, x, scale=0.5, groups=[[0]]), x)
    both = [x, x + 1]
    assert xm.all_reduce("sum", both) is both
    copy = xm.all_reduce("min", x)
    copy += 1
    assert x[0].item() == 0.0
    with pytest.raises(ValueError, match=r"groups \[\[0, 1\], \[2, 3\]\] needs several replicas"):
        xm.all_reduce("sum", x, groups=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="'mean' is no reduction; there are sum, mul, and"):
        xm.all_reduce("mean", x)


def test_all_gather(x):
    same(xm.all_gather(x), x)
    same(xm.all_gather(x, dim=-1, pin_layout=False, groups=[[0]]), x)
    out = torch.zeros(8, device="jax")
    assert xm.all_gather(x, output=out) is out
    same(out, x)
    outs = [torch.zeros(8, device="jax"), torch.zeros(8, device="jax")]
    got = xm.all_gather([x, x + 1], output=outs, pin_layout=False)
    assert got[0] is outs[0] and got[1].tolist() == (x + 1).tolist()
    for one, want in zip(xm.all_gather([x, x + 1], pin_layout=False), [x, x + 1], strict=True):
        same(one, want)
    with pytest.raises(RuntimeError, match="cannot pin the layout"):
        xm.all_gather([x])
    with pytest.raises(TypeError, match="a list of tensors as its input, not tuple"):
        xm.all_gather((x,), pin_layout=False)
    with pytest.raises(ValueError, match="got 1 tensors and 2 outputs"):
        xm.all_gather([x], output=outs, pin_layout=False)
    with pytest.raises(TypeError, match="as output, not int"):
        xm.all_gather([x], output=3, pin_layout=False)
    with pytest.raises(IndexError, match="has no axis 1"):
        xm.all_gather(x, dim=1)
    with pytest.raises(ValueError, match=r"\[\[0, 1\]\]"):
        xm.all_gather(x, groups=[[0, 1]])


def test_reduce_scatter(x):
    same(xm.reduce_scatter("sum", x, 1.0, 0, 1), x)
    same(xm.reduce_scatter("sum", x, 0.5, 0, 1), x * 0.5)
    out = torch.zeros(8, device="jax")
    assert xm.reduce_scatter("sum", x, 0.5, 0, 1, output=out) is out
    same(out, x * 0.5)
    halves = xm.reduce_scatter("sum", [x, x + 2], 0.5, 0, 1)
    assert [half[0].item() for half in halves] == [0.0, 1.0]
    with pytest.raises(ValueError, match="shard_count=8 needs 8 replicas"):
        xm.reduce_scatter("sum", x, 1.0, 0, 8)


def test_the_others(x):
    same(xm.all_to_all(x.reshape(4, 2), 0, 1, 1), x.reshape(4, 2))
    with pytest.raises(ValueError, match="split_count=2 needs 2 replicas"):
        xm.all_to_all(x, 0, 0, 2)
    same(xm.collective_permute(x, [[0, 0]]), x)
    assert xm.collective_permute(x, []).tolist() == [0.0] * 8
    with pytest.raises(ValueError, match="collective_permute"):
        xm.collective_permute(x, [[0, 1], [1, 0]])
    assert xm.collective_broadcast([x]) is None and x[3].item() == 3.0
    with pytest.raises(ValueError, match=r"groups \[\[1\]\]"):
        xm.collective_broadcast([x], root_ordinal=1)
    model = torch.nn.Linear(2, 2).to("jax")
    before = model.weight.tolist()
    xm.broadcast_master_param(model)
    assert model.weight.tolist() == before
    for function, argument in ((xm.send, x), (xm.recv, x)):
        with pytest.raises(RuntimeError, match=f"{function.__name__} needs another replica"):
            function(argument, 1)


def test_meeting(x):
    assert xm.rendezvous("tag") == [b""]
    assert xm.rendezvous("tag", b"payload", [0]) == [b"payload"]
    assert xm.xla_rendezvous(b"payload", tag="tag") == [b"payload"]
    with pytest.raises(ValueError, match=r"a rendezvous of \[0, 1\] would need several"):
        xm.rendezvous("tag", b"payload", [0, 1])
    with pytest.raises(TypeError, match="bytes, not str"):
        xm.rendezvous("tag", "payload")
    assert xm.mesh_reduce("loss", 3.0, sum) == 3.0
    got = xm.mesh_reduce("loss", {"x": x}, lambda parts: parts[0]["x"])
    assert got.device.type == "cpu" and got.tolist() == x.tolist()


def test_on_ordinals(x):
    assert xm.do_on_ordinals(lambda t, n: (t.device.type, n), (x, 3)) == ("cpu", 3)
    assert xm.do_on_ordinals(lambda: 3, ordinals=0) == 3
    assert xm.do_on_ordinals(lambda: 3, ordinals=(1, 2)) is None


@pytest.mark.parametrize(
    ("sizes", "cap", "buckets"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([3, 1], 2, [1, 1]),
        ([1, 3, 1], 2, [1, 1, 1]),
        ([1, 3, 1], 3, [1, 1, 1]),
        ([1, 4, 1], 3, [2, 1]),
        ([1, 1, 1], 160, [3]),
        ([], 2, []),
    ],
)
def test_buckets(sizes, cap, buckets):
    seen = []

    def function(tensors, outputs):
        assert outputs is None
        seen.append(1 if isinstance(tensors, torch.Tensor) else len(tensors))
        return tensors

    tensors = [torch.full((size << 18,), float(n)) for n, size in enumerate(sizes)]
    got = xm.CoalescingBuckets(function, tensors, bucket_cap_mb=cap)()
    assert seen == buckets
    assert all(one is tensor for one, tensor in zip(got, tensors, strict=True))


def test_buckets_with_outputs(x):
    outs = [torch.zeros(8, device="jax") for _ in range(3)]
    got = xm.all_gather_bucketized([x, x + 1, x + 2], output=outs, bucket_cap_mb=0)
    assert [one.tolist() for one in outs] == [(x + n).tolist() for n in range(3)]
    assert all(one is out for one, out in zip(got, outs, strict=True))
    halves = xm.reduce_scatter_bucketized("sum", [x, x + 2], 0.5, 0, 1)
    assert [half[0].item() for half in halves] == [0.0, 1.0]
    xm.all_reduce_bucketized_gradients([x, x], 0.5, None, True)
    assert x[1].item() == 1.0
    with pytest.raises(RuntimeError, match="cannot pin"):
        xm.all_gather_bucketized([x], pin_layout=True)
    with pytest.raises(TypeError, match="takes a list of tensors as input_list, not XLASh"):
        xm.CoalescingBuckets(print, x)
    with pytest.raises(ValueError, match="1 tensors and 0 outputs"):
        xm.CoalescingBuckets(print, [x], [])
