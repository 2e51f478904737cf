"""`scan` and `scan_layers`: numbers and gradients of the Python loop, one entry each way."""

from __future__ import annotations

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_xla_bridge.torch_xla.experimental.scan import scan
from isoshard.torch_xla_bridge.torch_xla.experimental.scan_layers import scan_layers


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(fn, init, xs_):
    """What scan must equal: the loop."""
    leaves, spec = torch.utils._pytree.tree_flatten(xs_)
    carry, ys = init, []
    for number in range(next(leaf.shape[0] for leaf in leaves if leaf is not None)):
        part = [None if leaf is None else leaf[number] for leaf in leaves]
        carry, y = fn(carry, torch.utils._pytree.tree_unflatten(part, spec))
        ys.append(y)
    rows, spec = zip(*(torch.utils._pytree.tree_flatten(y) for y in ys), strict=True)
    stacked = [None if row[0] is None else torch.stack(row) for row in zip(*rows, strict=True)]
    return carry, torch.utils._pytree.tree_unflatten(stacked, spec[0])


def compare(run):
    """Run the same code with the loop on the CPU and with scan on the device."""
    got = [t.detach().cpu() for t in run(scan, "jax")]
    want = [t.detach() for t in run(by_hand, "cpu")]
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def leaf(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.clone().to(device).requires_grad_()


@pytest.mark.parametrize(
    "options",
    [
        {"partition_fn": default_partition},
        {"partition_fn": min_cut_rematerialization_partition},
        {"is_fn_pure": True},
    ],
    ids=["default_partition", "recomputed", "pure"],
)
def test_nested_carry_none_integers_and_tensors_from_around(x64, options):
    def run(loop, device):
        w, bias = leaf(data(4, 4), device), leaf(data(4, seed=1), device)
        x, c = leaf(data(5, 3, 4, seed=2), device), leaf(data(3, 4, seed=3), device)
        computed = (w * 2).sin()

        def fn(carry, one):
            hidden = torch.tanh(carry["h"] @ computed.t() + one["x"] * w.sum()) + bias
            new = {"h": hidden, "n": carry["n"] + 1, "none": None}
            return new, (hidden * one["x"], [None, carry["n"] * 2, hidden.detach()])

        init = {"h": c, "n": torch.zeros((), dtype=torch.int64, device=device), "none": None}
        extra = options if loop is scan else {}
        last, (ys, (_, counts, detached)) = loop(fn, init, {"x": x, "none": None}, **extra)
        assert last["none"] is None and ys.requires_grad and not detached.requires_grad
        with torch.no_grad():
            assert not loop(fn, init, {"x": x, "none": None}, **extra)[0]["h"].requires_grad
        (last["h"].sum() + ys.square().sum()).backward()
        return last["h"], last["n"], ys, counts, w.grad, bias.grad, x.grad, c.grad

    compare(run)


def test_one_entry_each_way_and_no_second_compilation(counted):
    w, x = leaf(data(4, 4).float(), "jax"), data(50, 4).float().to("jax")
    init = torch.zeros(4, device="jax")
    xs.sync()
    calls, compilations = [], []

    def step():
        def fn(carry, one):  # another function object in every step
            calls.append(1)
            return torch.tanh(carry @ w + one), None

        w.grad = None
        last, _ = scan(fn, init, x)
        last.sum().backward()
        entries = len([e for e in tapes.recorder().program if isinstance(e[0], int)])
        xs.sync()
        compilations.append(counted("compilations"))
        return entries

    assert max(step() for _ in range(3)) < 12
    assert len(calls) == 3
    assert compilations[1:] == [compilations[1]] * 2


def test_a_pure_function_runs_once():
    calls = []

    def fn(carry, one):
        calls.append(1)
        return carry + one, carry

    for factor in (1, 2, 3):
        x = (torch.arange(3.0) * factor).to("jax")
        last, _ = scan(fn, torch.zeros((), device="jax"), x, is_fn_pure=True)
        assert last.item() == 3 * factor
        # numbers from around are those of each call where it is not pure
        last, _ = scan(lambda c, x: (c + factor, None), torch.zeros((), device="jax"), x)  # noqa: B023
        assert last.item() == 3 * factor
    scan(fn, torch.zeros(2, device="jax"), torch.ones(3, 2, device="jax"), is_fn_pure=True)
    assert len(calls) == 2


def test_random_numbers_differ_between_steps_and_agree_with_backward():
    x = torch.ones(6, 100, device="jax", requires_grad=True)

    def fn(carry, one):
        return carry, torch.nn.functional.dropout(one, 0.5)

    def checkpointed(carry, one):
        return carry, checkpoint(lambda h: fn(None, h)[1], one, use_reentrant=False)

    for step, recompute in ((checkpointed, None), (fn, min_cut_rematerialization_partition)):
        _, ys = scan(step, torch.zeros((), device="jax"), x, partition_fn=recompute)
        (grad,) = torch.autograd.grad(ys.sum(), x)
        torch.testing.assert_close(grad.cpu(), ys.detach().cpu())
        rows = {tuple(row.tolist()) for row in ys.cpu()}
        assert len(rows) == 6
    _, again = scan(fn, torch.zeros((), device="jax"), x)
    assert not torch.equal(again.cpu(), ys.cpu())


def test_buffers_that_are_written_to(x64):
    def run(loop, device):
        norm = torch.nn.BatchNorm1d(3).double().to(device)
        x, init = leaf(data(5, 4, 3), device), torch.zeros((), device=device)
        _, ys = loop(lambda c, x: (c, norm(x)), init, x)
        ys.square().sum().backward()
        return ys, x.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked

    compare(run)


def test_nested_loops_and_layers_inside(x64):
    def run(loop, device):
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2)).double()
        for number, parameter in enumerate(layers.parameters()):
            parameter.data = data(*parameter.shape, seed=number)
        layers, x = layers.to(device), leaf(data(4, 5, 3), device)

        def inner(carry, one):
            return torch.tanh(layers[0](carry) + one), carry.sum()

        def fn(carry, rows):
            return loop(inner, layers[1](carry), rows)

        last, ys = loop(fn, torch.zeros(3, device=device, dtype=torch.float64), x)
        (last.sum() + ys.square().sum()).backward()
        return last, ys, x.grad, *(p.grad for p in layers.parameters())

    compare(run)


def test_autocast_reaches_inside():
    w, x = leaf(data(4, 4).float(), "jax"), data(3, 4, 4).float().to("jax")
    with torch.autocast("jax", dtype=torch.bfloat16):
        _, ys = scan(lambda c, x: (c, x @ w), torch.zeros((), device="jax"), x)
    assert ys.dtype == torch.bfloat16
    ys.sum().backward()
    assert w.grad.dtype == torch.float32


def test_sharded_tensors_stay_sharded(mesh):
    x = xs.mark_sharding(data(3, 8, 4).float().to("jax"), mesh, (None, "x", "y"))
    _, ys = scan(lambda c, x: (c, x * 2), torch.zeros((), device="jax"), x)
    xs.sync()
    assert iso.sharding_of(ys).spec == P(None, "x", "y")

    def marking(carry, one):
        return carry, xs.mark_sharding(one * 1, mesh, ("y", None))

    _, ys = scan(marking, torch.zeros((), device="jax"), x)
    torch.testing.assert_close(ys.cpu(), x.cpu())


@pytest.mark.parametrize("pure", [False, True])
def test_nothing_is_kept_that_nobody_holds(pure):
    w, x = leaf(data(4, 4).float(), "jax"), data(5, 4).float().to("jax")
    xs.sync()

    def step():
        helper = (x * 3).sum()
        init, rows = torch.tanh(w.sum(0)), x * 2
        last, ys = scan(lambda c, x: (c * x + helper, c @ w), init, rows, is_fn_pure=pure)
        loss = last.sum() + ys.sum()
        loss.backward()
        return loss

    gc.disable()  # what is kept until the next collection would be a result of the program
    try:
        loss = step()
        live = program.request_of(tapes.recorder()).live
    finally:
        gc.enable()
    assert len(live) == 2  # the loss and the gradient
    assert loss.isfinite()


def test_a_pure_function_notices_modes_and_what_wants_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.9)).to("jax")
    x, zero = torch.ones(2, 3, device="jax"), torch.zeros((), device="jax")

    def fn(carry, one):
        return carry, model(one)

    model.eval().requires_grad_(False)
    _, ys = scan(fn, zero, x, is_fn_pure=True)
    assert not ys.requires_grad
    assert torch.equal(ys[0].cpu(), ys[1].cpu())
    model.requires_grad_(True)
    _, ys = scan(fn, zero, x, is_fn_pure=True)
    ys.sum().backward()
    assert model[0].bias.grad.tolist() == [2, 2, 2]
    model.train()
    _, ys = scan(fn, zero, x.expand(2, 3), is_fn_pure=True)
    assert (ys == 0).any()


def test_while_jax_traces():
    w = data(3, 3).float()

    def code(weight, x):
        def fn(carry, one):
            return torch.tanh(carry @ weight + one), carry.sum()

        last, ys = scan(fn, torch.zeros(3, device="jax"), x)
        return last.sum() + ys.sum()

    x = data(4, 3).float()
    leaf_w = w.clone().requires_grad_()
    carry, total = torch.zeros(3), 0.0
    for row in x:
        total = total + carry.sum()
        carry = torch.tanh(carry @ leaf_w + row)
    (total + carry.sum()).backward()
    grad = jax.jit(jax.grad(iso.jax_function(code)))(jnp.asarray(w), jnp.asarray(x))
    np.testing.assert_allclose(grad, leaf_w.grad, rtol=1e-4, atol=1e-5)


def test_integers_that_follow_from_tensors_with_gradients():
    w = torch.tensor([1.0, -2.0, 3.0], device="jax", requires_grad=True)
    each = torch.tensor([10, 20, 30], device="jax")

    def fn(carry, x):
        return carry + (w * x > 0) * each, None

    got, _ = scan(fn, torch.zeros(3, dtype=torch.int64, device="jax"), torch.ones(2, 3).to("jax"))
    assert got.tolist() == [20, 0, 60] and not got.requires_grad


def test_a_carry_of_64_bits_under_jax():
    def code(x):
        return scan(lambda n, x: (n + 1, x * n), torch.zeros((), dtype=torch.int64).to("jax"), x)

    last, ys = iso.jax_function(code)(jnp.ones((3, 2)))
    assert last == 3 and ys.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_no_steps():
    last, ys = scan(
        lambda c, x: (c + x.sum(), x * 2), torch.ones((), device="jax"), torch.ones(0, 3).to("jax")
    )
    assert last.item() == 1
    assert ys.shape == (0, 3)


@pytest.mark.parametrize(("wants", "pure"), [(False, True), (True, False)])
def test_a_step_may_write_to_its_carry(wants, pure):
    def fn(carry, one):
        total, count = carry
        total += one * one
        count.add_(1)
        return (total, count), total * count

    def copying(carry, one):
        return fn([t.clone() for t in carry], one)

    def run(loop, device):
        x = data(5, 3).to(device).requires_grad_(wants)
        start, count = data(3, seed=1).to(device), torch.zeros((), device=device).double()
        options = {"is_fn_pure": pure} if loop is scan else {}
        for _ in range(2):
            (total, count), seen = loop(
                fn if loop is scan else copying, (start, count), x, **options
            )
        found = [total, seen, count, start]
        if wants:
            (total.sum() * 3 + seen.square().sum()).backward()
            found.append(x.grad)
        return found

    compare(run)


def test_mistakes_of_scan():
    x, zero = torch.ones(3, 2, device="jax"), torch.zeros((), device="jax")
    with pytest.raises(ValueError, match=r"scan takes a function fn\(carry, x\), not 3"):
        scan(3, zero, x)
    with pytest.raises(ValueError, match="at least one tensor in xs"):
        scan(lambda c, x: (c, x), zero, {"a": None})
    with pytest.raises(ValueError, match=r"xs\['a'\] has 3, xs\['b'\] has 4"):
        scan(lambda c, x: (c, None), zero, {"a": x, "b": torch.ones(4, device="jax")})
    with pytest.raises(ValueError, match="has no axes"):
        scan(lambda c, x: (c, None), zero, zero)
    with pytest.raises(TypeError, match=r"init\[1\] is on cpu; move it"):
        scan(lambda c, x: (c, None), (zero, torch.ones(1)), x)
    with pytest.raises(
        TypeError, match=r"init\['h'\] is \(2,\) torch.float32, the new one \(2, 2\)"
    ):
        scan(lambda c, x: ({"h": x.expand(2, 2)}, None), {"h": x[0]}, x)
    with pytest.raises(
        TypeError, match=r"init is \(\) torch.float32, the new one \(\) torch.int64"
    ):
        scan(lambda c, x: (c.long(), None), zero, x)
    with pytest.raises(TypeError, match="must return a carry like the one it takes"):
        scan(lambda c, x: ((c, c), None), zero, x)
    with pytest.raises(TypeError, match=r"must return \(carry, y\), and returned XLAShardedTensor"):
        scan(lambda c, x: c, zero, x)
    with pytest.raises(ValueError, match=r"works on a torch\.fx graph"):
        scan(lambda c, x: (c, x), zero, x, partition_fn=lambda *args: None)
    with pytest.raises(
        ValueError, match=r"writes to its arguments in place \(\(2,\) torch.float32\)"
    ):
        scan(lambda c, x: (c, x.add_(1)), zero, x)
    with pytest.raises(RuntimeError, match="needs the value of a tensor that is not computed yet"):
        scan(lambda c, x: (c, x if x.sum() > 0 else -x), zero, x)
    kept = []
    scan(lambda c, x: (c, kept.append(x * 2)), zero, x)
    with pytest.raises(RuntimeError, match="outlives it: it was kept in an attribute"):
        kept[0].tolist()
    weight = torch.ones(2, device="jax").requires_grad_()
    with pytest.raises(ValueError, match=r"calls backward\(\), whose gradient .* \(2,\) would be"):
        scan(lambda c, x: (c, (x * weight).sum().backward()), zero, x)
    with pytest.raises(ValueError, match=r"takes the gradient of a tensor of shape \(2,\) from o"):
        scan(
            lambda c, x: (c + (c * weight).sum(), torch.autograd.grad(c * weight.sum(), weight)),
            zero,
            x,
        )
    own = xs.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=r"draws from a torch.Generator of its own"):
        scan(lambda c, x: (c, torch.rand(2, generator=own, device="jax")), zero, x)


def test_what_cannot_be_differentiated_is_refused():
    x = leaf(data(3, 2).float(), "jax")
    _, ys = scan(lambda c, x: (c, x.square()), torch.zeros((), device="jax"), x)
    with pytest.raises(RuntimeError, match="scan has no gradients of gradients"):
        torch.autograd.grad(ys.sum(), x, create_graph=True)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    with pytest.raises(ValueError, match="hands a tensor from outside to a torch"):
        scan(lambda c, one: (c, one + Twice.apply(x).sum()), torch.zeros((), device="jax"), x)
    with pytest.raises(
        ValueError, match=r"writes in place to a tensor .* that requires a gradient"
    ):

        def fn(carry, one):
            with torch.no_grad():
                x.mul_(2)
            return carry, one * x.sum()

        scan(fn, torch.zeros((), device="jax"), x)
    torch.testing.assert_close(x.detach().cpu(), data(3, 2).float())


def stack() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
        for _ in range(3)
    )


def test_numbers_gradients_and_buffers_are_those_of_the_layers_in_turn():
    layers, x = stack(), data(6, 4).float()
    want, y = copy.deepcopy(layers), x.clone().requires_grad_()
    h = y
    for layer in want:
        h = layer(h)
    h.square().sum().backward()
    layers, z = layers.to("jax"), x.to("jax").requires_grad_()
    parameters = list(layers.parameters())
    recomputed = min_cut_rematerialization_partition
    scan_layers(layers, z, partition_fn=recomputed).square().sum().backward()
    assert all(a is b for a, b in zip(layers.parameters(), parameters, strict=True))
    torch.testing.assert_close(z.grad.cpu(), y.grad, rtol=1e-4, atol=1e-5)
    for one, two in zip(layers.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=1e-4, atol=1e-5)
    for one, two in zip(layers.buffers(), want.buffers(), strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=1e-4, atol=1e-5)


def test_tuples_are_arguments_and_nothing_is_left_on_the_layers():
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, a, b):
            return torch.tanh(self.linear(a)), b + a

    layers = [Pair() for _ in range(3)]
    x = (data(2, 3).float(), data(2, 3).float())
    want = x
    for layer in layers:
        want = layer(*want)
    layers = [layer.to("jax") for layer in layers]
    got = scan_layers(iter(layers), tuple(t.to("jax") for t in x))
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach().cpu(), two.detach())
    assert list(layers[0].state_dict()) == ["linear.weight", "linear.bias"]
    seen = weakref.ref(layers[0])
    del layers, layer, got, one, two
    gc.collect()
    assert seen() is None


def test_no_layers_and_mistakes():
    x = data(2, 4).float().to("jax")
    assert scan_layers([], x) is x
    layers = [torch.nn.Linear(4, 4).to("jax"), torch.nn.Linear(4, 4, bias=False).to("jax")]
    with pytest.raises(ValueError, match="layer 1 differs from layer 0 in: bias"):
        scan_layers(layers, x)
    with pytest.raises(TypeError, match="must return what it takes"):
        scan_layers([torch.nn.Linear(4, 3).to("jax")], x)
    with pytest.raises(ValueError, match="possible are functorch"):
        scan_layers(layers[:1], x, partition_fn=print)
