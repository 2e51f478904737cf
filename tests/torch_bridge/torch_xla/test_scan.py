"""`scan`: the numbers and gradients of the Python loop, as one entry forward and one backward."""

from __future__ import annotations

import gc

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
from isoshard.torch_bridge.torch_xla.experimental.scan import scan


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
        {},
        {"partition_fn": default_partition},
        {"partition_fn": min_cut_rematerialization_partition},
        {"is_fn_pure": True},
    ],
    ids=["plain", "default_partition", "recomputed", "pure"],
)
def test_nested_carry_none_integers_and_tensors_from_around(x64, options):
    def run(loop, device):
        w, bias = leaf(data(4, 4), device), leaf(data(4, seed=1), device)
        x, c = leaf(data(5, 3, 4, seed=2), device), leaf(data(3, 4, seed=3), device)
        computed = (w * 2).sin()

        def fn(carry, one):
            hidden = torch.tanh(carry["h"] @ computed.t() + one["x"] * w.sum()) + bias
            new = {"h": hidden, "n": carry["n"] + 1, "none": None}
            return new, (hidden * one["x"], [None, carry["n"] * 2])

        init = {"h": c, "n": torch.zeros((), dtype=torch.int64, device=device), "none": None}
        extra = options if loop is scan else {}
        last, (ys, (_, counts)) = loop(fn, init, {"x": x, "none": None}, **extra)
        assert last["none"] is None
        (last["h"].sum() + ys.square().sum()).backward()
        return last["h"], last["n"], ys, counts, w.grad, bias.grad, x.grad, c.grad

    compare(run)


def test_results_that_have_no_gradient_and_inputs_that_want_none(x64):
    def run(loop, device):
        x, c = data(4, 3).to(device), leaf(data(3, seed=1), device)

        def fn(carry, one):
            return carry * 2 + one.detach(), (carry.detach(), one * 3, carry)

        last, ys = loop(fn, c, x)
        assert [y.requires_grad for y in ys] == [False, False, True]
        (last.sum() + ys[2].sum()).backward()
        return last, *ys, c.grad

    compare(run)
    with torch.no_grad():
        last, _ = scan(lambda c, x: (c + x, None), *(leaf(data(3, 2), "jax")[i] for i in (0, 1)))
    assert not last.requires_grad


def test_only_a_tensor_from_around_wants_a_gradient(x64):
    def run(loop, device):
        w = leaf(data(3, 3), device)
        init, x = data(3).to(device), data(4, 3).to(device)
        last, ys = loop(lambda c, x: (torch.tanh(w @ c + x), c * w.sum()), init, x)
        (last.sum() + ys.sum()).backward()
        return last, w.grad

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

    assert max(step() for _ in range(4)) < 12
    assert len(calls) == 4
    assert compilations[1:] == [compilations[1]] * 3


def test_a_pure_function_runs_once():
    calls = []

    def fn(carry, one):
        calls.append(1)
        return carry + one, carry

    for factor in (1, 2, 3):
        x = (torch.arange(3.0) * factor).to("jax")
        last, _ = scan(fn, torch.zeros((), device="jax"), x, is_fn_pure=True)
        assert last.item() == 3 * factor
    scan(fn, torch.zeros(2, device="jax"), torch.ones(3, 2, device="jax"), is_fn_pure=True)
    assert len(calls) == 2


def test_numbers_from_around_are_those_of_each_call():
    x = torch.ones(3, device="jax")
    for rate in (0.5, 0.25):
        last, _ = scan(lambda c, x: (c + x * rate, None), torch.zeros((), device="jax"), x)  # noqa: B023
        assert last.item() == 3 * rate


def test_random_numbers_differ_between_steps_and_agree_with_backward():
    x = torch.ones(6, 100, device="jax", requires_grad=True)

    def fn(carry, one):
        y = torch.nn.functional.dropout(one, 0.5)
        return carry, y

    for recompute in (None, min_cut_rematerialization_partition):
        _, ys = scan(fn, torch.zeros((), device="jax"), x, partition_fn=recompute)
        (grad,) = torch.autograd.grad(ys.sum(), x)
        torch.testing.assert_close(grad.cpu(), ys.detach().cpu())
        rows = {tuple(row.tolist()) for row in ys}
        assert len(rows) == 6
        _, again = scan(fn, torch.zeros((), device="jax"), x)
        assert not torch.equal(again.cpu(), ys.cpu())


def test_checkpoint_with_dropout_inside():
    w = leaf(data(100).float(), "jax")

    def inner(h):
        return torch.nn.functional.dropout(h * w, 0.5)

    def fn(carry, one):
        return carry, checkpoint(inner, one, use_reentrant=False)

    x = torch.ones(3, 100, device="jax")
    _, ys = scan(fn, torch.zeros((), device="jax"), x)
    ys.sum().backward()
    torch.testing.assert_close(w.grad.cpu(), (ys / w).sum(0).detach().cpu())


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


def test_in_a_compiled_step():
    w = leaf(data(4, 4).float(), "jax")
    optimizer = torch.optim.AdamW([w], 0.1)

    def plain(x):
        optimizer.zero_grad()
        last, ys = scan(lambda c, x: (torch.tanh(c @ w + x), c), torch.zeros(4, device="jax"), x)
        loss = last.square().sum() + ys.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step, x = xs.compile(plain), data(5, 4).float().to("jax")
    start = w.detach().clone()
    got = [step(x).item() for _ in range(3)]
    with torch.no_grad():
        w.copy_(start)
    optimizer.state.clear()
    assert got == pytest.approx([plain(x).item() for _ in range(3)], rel=1e-5)


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
        live = program.plan_of(tapes.recorder()).live
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


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("pure", [False, True])
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


def test_the_carry_that_is_returned_as_a_result_is_that_of_its_step():
    def add(total, x):
        total += x
        return total, total

    start = torch.zeros(1, device="jax")
    total, seen = scan(add, start, torch.tensor([1.0, 2.0, 3.0], device="jax"))
    assert (start.tolist(), total.tolist(), seen.tolist()) == ([0.0], [6.0], [[1.0], [3.0], [6.0]])
