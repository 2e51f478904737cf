"""Collectives, replicas, process groups, core.functions and amp, where there is one replica."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import isoshard.torch_xla_bridge.torch_xla as torch_xla
from isoshard.torch_xla_bridge.torch_xla import amp
from isoshard.torch_xla_bridge.torch_xla.amp import syncfree
from isoshard.torch_xla_bridge.torch_xla.core import functions
from isoshard.torch_xla_bridge.torch_xla.core import xla_model as xm
from isoshard.torch_xla_bridge.torch_xla.distributed import xla_backend
from isoshard.torch_xla_bridge.torch_xla.distributed import xla_multiprocessing as xmp


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
    with pytest.raises(ValueError, match=r"a rendezvous of \[0, 1\] needs several"):
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


def test_buckets():
    for sizes, cap, buckets in (
        ([1, 1, 1, 1], 2, [2, 2]),
        ([3, 1], 2, [1, 1]),
        ([1, 3, 1], 2, [1, 1, 1]),
        ([1, 3, 1], 3, [1, 1, 1]),
        ([1, 4, 1], 3, [2, 1]),
        ([1, 1, 1], 160, [3]),
        ([], 2, []),
    ):
        seen = []

        def function(tensors, outputs, seen=seen):
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


# --- Processes -----------------------------------------------------------------------------------


def test_one_replica_runs_here(monkeypatch):
    seen = []
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    assert xmp.spawn(lambda index, *args: seen.append((index, args)), ("a", 1)) is None
    monkeypatch.setenv("XLA_USE_SPMD", "0")
    xmp.spawn(lambda index: seen.append(index), nprocs=1, start_method="fork")
    assert seen == [(0, ("a", 1)), 0]
    with pytest.raises(NotImplementedError, match=r"there are 8 chips.*\.use_spmd\(\), mark"):
        xmp.spawn(seen.append)
    with pytest.raises(ValueError, match="4 replicas were requested"):
        xmp.spawn(seen.append, nprocs=4)
    with pytest.raises(KeyError, match="mine"):
        xmp.spawn(lambda _: {}["mine"], nprocs=1)
    monkeypatch.delenv("XLA_USE_SPMD")
    with pytest.raises(NotImplementedError, match="debug_single_process=True of launch"):
        torch_xla.launch(print)
    model = torch.nn.Linear(2, 2)
    assert xmp.MpModelWrapper(model).to("jax") is model
    assert model.weight.device.type == "jax"
    assert xmp.MpSerialExecutor().run(lambda: 7) == 7
    (model.weight * 3).sum().backward()
    (gradient,) = xm._fetch_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    assert gradient.tolist() == [[3.0, 3.0]] * 2


@pytest.fixture
def no_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_of_gloo_meets_by_xla(no_group):
    dist.init_process_group("gloo", init_method="xla://")
    assert dist.get_world_size() == 1 and dist.get_rank() == 0
    t = torch.ones(3)
    dist.all_reduce(t)
    dist.barrier()
    gathered = [None]
    dist.all_gather_object(gathered, {"x": 1})
    assert t.tolist() == [1.0] * 3 and gathered == [{"x": 1}]
    dist.new_group([0])


def test_the_backend_xla_is_refused_with_advice(no_group):
    with pytest.raises(RuntimeError, match=r"no process group 'xla'.*\('gloo', init_method='xla:"):
        dist.init_process_group("xla", init_method="xla://")
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method="xla://")
    assert dist.get_backend() == "gloo"


def test_several_processes_meet_at_process_0(monkeypatch):
    import jax

    made = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: made.append((args, kwargs)))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "999")
    ((_, rank, size),) = xla_backend.rendezvous_handler("xla://")
    assert (rank, size) == (1, 2) and made == [(("10.0.0.7", 999, 2, False), {})]


# --- core.functions ------------------------------------------------------------------------------


def test_collectives_of_one_replica_pass_gradients():
    x = torch.randn(4, 3, device="jax", requires_grad=True)
    (functions.all_reduce("sum", x, scale=2.0) * functions.all_gather(x, 1)).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 4 * x.detach().cpu())


def test_distributed_mm():
    w, x = torch.randn(5, 4), torch.randn(4, 6)
    for split in (1, 3):
        got = functions.distributed_mm(w.to("jax"), x.to("jax"), split)
        torch.testing.assert_close(got.cpu(), w @ x)
    with pytest.raises(ValueError, match="x needs 4 rows, and columns that 4 divides"):
        functions.distributed_mm(w, x, 4)


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 4, 5)])
def test_sync_batch_norm_is_the_batch_norm_of_the_whole_batch(shape):
    x = torch.randn(*shape, dtype=torch.float64) * 2 + 1
    ours = functions.SyncBatchNorm(3).to("jax")
    want = torch.nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(ours(x.float().to("jax")).cpu().double(), want, rtol=1e-4, atol=1e-5)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    mean, var = 0.1 * x.mean(axes), 0.9 + 0.1 * x.var(axes, correction=0)
    torch.testing.assert_close(ours.running_mean.cpu().double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.running_var.cpu().double(), var, rtol=1e-5, atol=1e-6)
    want = torch.nn.functional.batch_norm(x, mean, var)
    got = ours.eval()(x.float().to("jax"))
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5)


# --- amp -----------------------------------------------------------------------------------------


def test_autocast_is_torchs():
    x = torch.randn(4, 4).to("jax")
    with amp.autocast(xm.xla_device()):
        product = x @ x
        assert torch.is_autocast_enabled("jax") and product.dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32
    with amp.autocast("jax:0", dtype=torch.float16):
        assert (x @ x).dtype == torch.float16
    with amp.autocast("jax", enabled=False):
        assert (x @ x).dtype == torch.float32
    with torch.autocast("jax", torch.bfloat16):
        torch.testing.assert_close(product, x @ x)

    @amp.autocast("jax")
    def decorated(x):
        return x @ x

    assert decorated(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="for jax:0, not for 'cuda'"):
        amp.autocast("cuda")


def test_a_scaled_step():
    def train(device, scaler, make):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).to(device)
        optimizer = make(model.parameters())
        for n in range(4):
            optimizer.zero_grad()
            x = torch.arange(8.0).reshape(2, 4).to(device) * (1e38 if n == 1 else 1)
            scaler.scale(model(x).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return model.weight.detach().cpu(), scaler.get_scale()

    want, scale = train("cpu", torch.amp.GradScaler("cpu", 8.0), lambda p: torch.optim.Adam(p, 0.1))
    got, ours = train("jax", amp.GradScaler(8.0), lambda p: syncfree.Adam(p, 0.1))
    torch.testing.assert_close(got, want)
    assert ours == scale == 4.0  # one step overflowed, and was skipped
    assert not amp.GradScaler(enabled=False).is_enabled()


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [
        (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (syncfree.Adam, torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
        (syncfree.AdamW, torch.optim.AdamW, {"lr": 0.1}),
    ],
)
def test_steps_are_skipped_on_the_device(ours, torchs, options, counted):
    start, gradient = torch.randn(5), torch.randn(5)
    reference = torch.nn.Parameter(start.clone())
    wanted = torchs([reference], **options)
    parameter = torch.nn.Parameter(start.clone().to("jax"))
    optimizer = ours([parameter], **options)
    xm.mark_step()
    ran = counted("transfers.device_to_host")
    for skip in (None, 0.0, 1.0, 0.0, 1.0):
        parameter.grad = gradient.clone().to("jax")
        found = None if skip is None else torch.full((), skip).to("jax")
        optimizer.step(found_inf=found)
        assert not hasattr(optimizer, "found_inf")
        if not skip:
            reference.grad = gradient.clone()
            wanted.step()
        xm.mark_step()
    assert counted("transfers.device_to_host") == ran  # nothing was read
    torch.testing.assert_close(parameter.detach().cpu(), reference.detach())
    with pytest.raises(ValueError, match=r"one number, and its shape is \(1,\)"):
        optimizer.step(found_inf=torch.zeros(1, device="jax"))
    slow = ours([parameter], foreach=True, **options)
    with pytest.raises(ValueError, match="found_inf needs the fused step"):
        slow.step(found_inf=torch.zeros((), device="jax"))
    assert optimizer.step(lambda: 3.0) == 3.0
