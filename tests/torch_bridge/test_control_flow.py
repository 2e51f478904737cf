"""`torch.cond`, `while_loop`, `scan` and `map`: as written out on the CPU, as one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan, while_loop

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_xla_bridge.torch_xla.experimental.fori_loop import fori_loop
from isoshard.torch_xla_bridge.torch_xla.experimental.fori_loop import (
    while_loop as their_while_loop,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo's own


@pytest.fixture(autouse=True)
def forgotten():
    yield
    torch.compiler.reset()


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def repeated(function, x, times):
    """A loop written out."""
    for _ in range(times):
        x = function(x)
    return x


def scanned(function, carry, x):
    """A scan written out."""
    found = []
    for row in x:
        carry, one = function(carry, row)
        found.append(one)
    return carry, torch.stack(found)


def halved(x):
    return x * 0.5 if x.sum() > 3 else x * 2


PROGRAMS = {
    "cond": (
        lambda x: torch.cond(x.sum() > 1, lambda x: (x.sin(),), lambda x: (x * 3,), (x,)),
        lambda x: (x.sin(),),
    ),
    "while": (
        lambda x: while_loop(lambda n, x: n < 4, lambda n, x: (n + 1, x.sin() * 2), (n_of(x), x)),
        lambda x: (torch.tensor(4), repeated(lambda x: x.sin() * 2, x, 4)),
    ),
    "scan": (
        lambda x: scan(lambda c, y: (c + y, c * y), x[0].clone(), x),
        lambda x: scanned(lambda c, y: (c + y, c * y), x[0], x),
    ),
    "map": (
        lambda x: (torch_map(lambda y, z: y * z.sum(), x, x * 2),),
        lambda x: (x * (x * 2).sum(),),
    ),
    "nested": (
        lambda x: while_loop(
            lambda n, x: n < 3,
            lambda n, x: (
                n + 1,
                torch.cond(x.sum() > 3, lambda x: (x * 0.5,), lambda x: (x * 2,), (x,))[0],
            ),
            (n_of(x), x),
        ),
        lambda x: (torch.tensor(3), repeated(halved, x, 3)),
    ),
}
"""By name: on the device, and the same written out."""


def n_of(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device)


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_written_out_on_the_cpu(name):
    found = []
    for device, program in zip(("jax", "cpu"), PROGRAMS[name], strict=True):
        x = data(4, 3).to(device).requires_grad_(name != "nested")  # whose gradient raises
        results = torch.utils._pytree.tree_leaves(program(x))
        if x.requires_grad:
            sum(one.square().sum() for one in results if one.requires_grad).backward()
            results.append(x.grad)
        found.append([one.detach().cpu() for one in results])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_it_is_one_program_that_is_soon_known(counted):
    def run(scale: float) -> torch.Tensor:
        start = (torch.tensor(0, device="jax"), torch.ones(3, device="jax") * scale)
        return while_loop(lambda n, x: x.sum() < 1000, lambda n, x: (n + 1, x * 2), start)

    compiled = []
    for number, (scale, want) in enumerate(((1.0, 9), (3.0, 7), (100.0, 2), (1e3, 0))):
        steps, _ = run(scale)
        assert counted("executions") == number
        assert steps.item() == want and counted("executions") == number + 1
        compiled.append(counted("compilations"))
    assert compiled[1] == compiled[-1] <= 2 and counted("fallbacks") == 0


def test_what_runs_in_python_is_counted(counted):
    x = data(2).to("jax")
    _, got = while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (0, x))
    assert counted("fallbacks") == counted("fallbacks.higher_order::while_loop") == 1
    torch.testing.assert_close(got.cpu(), data(2) * 8)


def test_in_compiled_steps_and_in_jax():
    def choose(x):
        return torch.cond(x.sum() > 0, lambda x: (x * 2,), lambda x: (x * 3,), (x,))[0]

    step = xs.compile(choose)
    for value, want in ((1.0, 2.0), (-1.0, -3.0), (2.0, 4.0)):
        assert step(torch.full((2,), value, device="jax")).tolist() == [want] * 2
    function = iso.jax_function(choose)
    assert jax.jit(function)(jnp.ones(2)).tolist() == [2, 2]
    assert jax.grad(lambda x: function(x).sum())(-jnp.ones(2)).tolist() == [3, 3]


def test_on_a_mesh():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    x = data(8, 4) / 4
    laid = iso.shard(x, mesh, P("x", "y"))
    steps, got = while_loop(
        lambda n, x: n < 3, lambda n, x: (n + 1, x @ x.t() @ x), (n_of(laid), laid)
    )
    for _ in range(3):
        x = x @ x.t() @ x
    assert steps.item() == 3
    torch.testing.assert_close(got.cpu(), x)


def test_random_numbers_of_each_step_are_their_own():
    x = torch.zeros(50, 2, device="jax")

    def draw() -> torch.Tensor:
        return torch_map(lambda y: y + torch.rand(2, device="jax"), x)

    torch.manual_seed(0)
    first = draw()
    torch.manual_seed(0)
    assert torch.equal(first.cpu(), draw().cpu())
    assert first.cpu().unique().numel() == 100
    assert not torch.equal(first.cpu(), draw().cpu())


def test_modules():
    model = torch.nn.Linear(3, 3)
    ours = torch.nn.Linear(3, 3).to("jax")
    ours.load_state_dict(model.state_dict())
    torch_map(lambda row: ours(row), data(4, 3).to("jax")).square().sum().backward()
    model(data(4, 3)).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), model.weight.grad)


def test_the_default_dtype_is_that_of_the_call():
    def divide(x):
        return torch.cond(x.sum() > 0, lambda x: (x / 2,), lambda x: (x / 3,), (x,))[0]

    x = torch.ones(3, dtype=torch.int64, device="jax")
    assert divide(x).cpu().dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        wide = divide(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert wide.dtype == wide.cpu().dtype == torch.float64  # computed later
    assert divide(x).cpu().dtype == torch.float32


def test_mistakes():
    x = torch.ones(2, device="jax")
    with pytest.raises(Exception, match=r"(?s)shape|dtype|metadata"):
        while_loop(lambda x: x.sum() < 9, lambda x: (x.repeat(2),), (x,))
    with pytest.raises(Exception, match=r"(?s)two devices|same device|device"):
        torch.cond(x.sum() > 0, lambda x, y: x + y, lambda x, y: x - y, (x, torch.ones(2)))


def test_torch_xlas_names():
    zero, ten = torch.tensor(0, device="jax"), torch.tensor(10, device="jax")
    left, value = fori_loop(zero, ten, lambda x: x + 1, torch.tensor(3, device="jax"))
    assert (left.item(), value.item()) == (0, 13)
    _, got = their_while_loop(
        lambda n, x, step: n > 0, lambda n, x, step: (n - 1, x + step), (ten, zero), (ten,)
    )
    assert got.item() == 100
