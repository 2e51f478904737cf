"""Random numbers of the `jax` device: the seed rules, nothing repeats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoshard.torch_bridge as xs

RANDOM: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(4, 8, device="jax"),
    "randn": lambda: torch.randn(4, 8, device="jax"),
    "randint": lambda: torch.randint(0, 1000, (4, 8), device="jax"),
    "randperm": lambda: torch.randperm(32, device="jax"),
    "rand_like": lambda: torch.rand_like(torch.ones(4, 8, device="jax")),
    "randn_like": lambda: torch.randn_like(torch.ones(4, 8, device="jax")),
    "randint_like": lambda: torch.randint_like(torch.ones(4, 8, device="jax"), 1000),
    "normal_": lambda: torch.empty(32, device="jax").normal_(2, 3),
    "uniform_": lambda: torch.empty(32, device="jax").uniform_(-1, 1),
    "exponential_": lambda: torch.empty(32, device="jax").exponential_(),
    "cauchy_": lambda: torch.empty(32, device="jax").cauchy_(),
    "log_normal_": lambda: torch.empty(32, device="jax").log_normal_(),
    "geometric_": lambda: torch.empty(32, device="jax").geometric_(0.1),
    "bernoulli_": lambda: torch.empty(32, device="jax").bernoulli_(0.5),
    "random_": lambda: torch.empty(32, device="jax").random_(0, 1000),
    "bernoulli": lambda: torch.full((32,), 0.5, device="jax").bernoulli(),
    "normal": lambda: torch.normal(torch.zeros(32, device="jax"), 1.0),
    "poisson": lambda: torch.poisson(torch.full((32,), 50.0, device="jax")),
    "multinomial": lambda: torch.multinomial(torch.ones(64, device="jax"), 16),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64, device="jax")),
    "alpha_dropout": lambda: torch.nn.functional.alpha_dropout(
        torch.ones(64, device="jax"), training=True
    ),
    "dropout2d": lambda: torch.nn.functional.dropout2d(torch.ones(4, 16, 2, 2, device="jax")),
    "gumbel": lambda: torch.nn.functional.gumbel_softmax(torch.zeros(8, device="jax")),
    "xavier": lambda: torch.nn.init.xavier_normal_(torch.empty(4, 8, device="jax")),
    "trunc": lambda: torch.nn.init.trunc_normal_(torch.empty(4, 8, device="jax")),
    "orthogonal": lambda: torch.nn.init.orthogonal_(torch.empty(4, 8, device="jax")),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_follow_the_seed_and_never_repeat(name):
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append([RANDOM[name]().tolist(), RANDOM[name]().tolist()])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_distributions_have_their_moments():
    torch.manual_seed(0)
    normal, uniform = torch.randn(20000, device="jax"), torch.rand(20000, device="jax")
    assert abs(normal.mean().item()) < 0.03 and abs(normal.std().item() - 1) < 0.03
    assert abs(uniform.mean().item() - 0.5) < 0.01 and 0 <= uniform.min().item()
    assert uniform.max().item() < 1
    kept = torch.nn.functional.dropout(torch.ones(20000, device="jax"), 0.25)
    np.testing.assert_allclose(kept.unique().cpu(), [0, 4 / 3], rtol=1e-6)
    assert abs(kept.count_nonzero().item() / 20000 - 0.75) < 0.02
    assert sorted(torch.randperm(50, device="jax").tolist()) == list(range(50))
    draws = torch.randint(3, 7, (2000,), device="jax")
    assert draws.unique().tolist() == [3, 4, 5, 6] and draws.dtype == torch.int64


def test_seeding_twice_gives_the_same_numbers_before_any_sync():
    torch.manual_seed(0)
    first = torch.rand(4, device="jax")
    torch.manual_seed(0)
    second = torch.rand(4, device="jax")
    assert torch.equal(first, second)


def test_a_seed_set_later_does_not_reach_back():
    torch.manual_seed(0)
    want = torch.rand(4, device="jax").tolist()
    torch.manual_seed(0)
    recorded = torch.rand(4, device="jax")
    torch.manual_seed(123)
    assert recorded.tolist() == want


def test_syncing_more_often_changes_no_numbers():
    torch.manual_seed(0)
    a, b = torch.rand(4, device="jax"), torch.randn(4, device="jax")
    want = a.tolist(), b.tolist()
    torch.manual_seed(0)
    a = torch.rand(4, device="jax")
    xs.sync()
    b = torch.randn(4, device="jax")
    assert (a.tolist(), b.tolist()) == want


def test_numbers_do_not_depend_on_the_mesh():
    torch.manual_seed(1)
    want = torch.randn(8, 8, device="jax").tolist()
    mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    for spec in (("x", "y"), (None, "y"), (("y", "x"), None)):
        torch.manual_seed(1)
        t = xs.mark_sharding(torch.randn(8, 8, device="jax"), mesh, spec)
        assert t.tolist() == want
    torch.manual_seed(1)
    t = xs.mark_sharding(torch.zeros(8, 8, device="jax"), mesh, ("x", "y"))
    assert t.normal_().tolist() == want


def test_dropout_in_training_differs_and_in_evaluation_does_nothing():
    model = torch.nn.Dropout(0.5)
    x = torch.ones(64, device="jax")
    assert model(x).tolist() != model(x).tolist()
    assert model.eval()(x).tolist() == [1.0] * 64


def test_the_random_state_can_be_saved_and_forked():
    torch.manual_seed(0)
    state = torch.get_device_module("jax").get_rng_state()
    want = torch.rand(4, device="jax").tolist()
    torch.get_device_module("jax").set_rng_state(state)
    assert torch.rand(4, device="jax").tolist() == want
    after = torch.rand(4, device="jax").tolist()
    torch.get_device_module("jax").set_rng_state(state)
    with torch.random.fork_rng(devices=[0], device_type="jax"):
        torch.manual_seed(99)
        torch.rand(4, device="jax")
    assert torch.rand(4, device="jax").tolist() == want
    assert torch.rand(4, device="jax").tolist() == after


def test_a_generator_is_honoured_or_refused():
    """A torch.Generator of the CPU steers CPU numbers; it must not be ignored here."""
    generator = torch.Generator().manual_seed(3)
    with pytest.raises(RuntimeError, match=r"'jax' device type for generator but found 'cpu'"):
        torch.rand(4, device="jax", generator=generator)
    with pytest.raises(RuntimeError, match=r"'jax' device type for generator but found 'cpu'"):
        torch.empty(4, device="jax").normal_(generator=generator)


# --- The same stream, however a step is run ------------------------------------------------------


class Noisy(torch.nn.Module):
    """Dropout, noise made like its input, and noise made from nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
        return x + torch.randn(8, 8, device="jax")


def noisy_runs(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list:
    torch.manual_seed(11)
    return [run(x).tolist() for _ in range(3)]


def test_one_stream_unsharded_sharded_and_compiled(mesh):
    model, x = Noisy(), torch.ones(8, 8, device="jax")
    want = noisy_runs(model, x)
    assert noisy_runs(xs.compile(model), x) == want
    for spec in (("x", "y"), (None, "y"), (("y", "x"), None), (None, None)):
        sharded = xs.mark_sharding(torch.ones(8, 8, device="jax"), mesh, spec)
        assert noisy_runs(model, sharded) == want
        assert noisy_runs(xs.compile(Noisy()), sharded) == want


@pytest.mark.parametrize("compiled", [False, True], ids=["lazy", "compiled"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask_again(reentrant, compiled):
    def step(x):
        x.grad = None
        dropped = checkpoint(
            lambda x: torch.nn.functional.dropout(x * x, 0.5), x, use_reentrant=reentrant
        )
        dropped.sum().backward()
        return dropped.detach(), x.grad

    x = torch.ones(64, device="jax", requires_grad=True)
    run = xs.compile(step) if compiled else step
    masks = []
    for _ in range(3):
        dropped, gradient = run(x)
        assert torch.equal(gradient, 2 * dropped)
        masks.append(dropped.tolist())
    assert masks[0] != masks[1] != masks[2]


def test_a_forked_state_inside_a_compiled_step_goes_on_where_it_was():
    def step(x):
        before = x + torch.rand(4, device="jax")
        with torch.random.fork_rng(devices=[0], device_type="jax"):
            inside = torch.rand(4, device="jax")
        return before, inside, torch.rand(4, device="jax")

    x = torch.zeros(4, device="jax")
    torch.manual_seed(1)
    want = [[part.tolist() for part in step(x)] for _ in range(3)]
    torch.manual_seed(1)
    compiled = xs.compile(step)
    got = [[part.tolist() for part in compiled(x)] for _ in range(3)]
    assert got == want
    assert [inside == after for _, inside, after in got] == [True] * 3


@pytest.mark.parametrize("seed", [5, 6])
def test_a_seed_set_inside_a_compiled_step_is_set_in_every_call(seed):
    def step(x):
        before = x + torch.rand(4, device="jax")
        torch.manual_seed(5)
        return before, torch.rand(4, device="jax")

    x = torch.zeros(4, device="jax")
    torch.manual_seed(seed)
    want = [[part.tolist() for part in step(x)] for _ in range(3)]
    torch.manual_seed(seed)
    compiled = xs.compile(step)
    assert [[part.tolist() for part in compiled(x)] for _ in range(3)] == want


def test_a_state_from_before_is_set_in_every_call_of_a_compiled_step():
    module = torch.get_device_module("jax")
    torch.manual_seed(5)
    state = module.get_rng_state()
    want = torch.rand(4, device="jax").tolist()

    @xs.compile
    def step(x):
        module.set_rng_state(state)
        return x + torch.rand(4, device="jax")

    x = torch.zeros(4, device="jax")
    assert [step(x).tolist() for _ in range(3)] == [want] * 3


def test_a_refused_step_draws_nothing():
    @xs.compile
    def step(x):
        y = x + torch.rand(4, device="jax")
        return y if y.sum() > 0 else x

    torch.manual_seed(2)
    state = torch.get_device_module("jax").get_rng_state()
    with pytest.raises(xs.CaptureError):
        step(torch.zeros(4, device="jax"))
    assert torch.equal(torch.get_device_module("jax").get_rng_state(), state)


def test_fork_rng_finds_the_device_by_itself():
    torch.manual_seed(3)
    state = torch.get_device_module("jax").get_rng_state()
    with torch.random.fork_rng(device_type="jax"):
        torch.manual_seed(4)
        torch.rand(2, device="jax")
    assert torch.equal(torch.get_device_module("jax").get_rng_state(), state)
