"""Random numbers of the `jax` device: the seed rules, nothing repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.spelled_calls import calls, outcome

RANDOM = """
    torch.rand(4, 8, device=d); torch.randint_like(torch.ones(4, 8, device=d), 1000)
    torch.empty(32, device=d).log_normal_(); torch.empty(32, device=d).random_(0, 1000)
    F.dropout(torch.ones(64, device=d)); F.gumbel_softmax(torch.zeros(8, device=d))
"""
"""The others draw from generators too, in `test_generator.py`."""


def test_random_numbers_follow_the_seed_and_never_repeat():
    draws, runs = calls(RANDOM), []
    for _ in range(2):
        torch.manual_seed(5)
        run = []
        for _ in range(2):  # by one program
            found = [outcome(draw, "jax") for draw in draws]
            xs.sync()
            run.append([one.tolist() for one in found])
        runs.append(run)
    assert runs[0] == runs[1]
    for draw, one, next_one in zip(draws, *runs[0], strict=True):
        assert one != next_one, draw


def test_when_numbers_are_computed_changes_none():
    torch.manual_seed(0)
    a, b = torch.rand(4, device="jax"), torch.randn(4, device="jax")
    want = a.tolist(), b.tolist()
    torch.manual_seed(0)
    a = torch.rand(4, device="jax")
    xs.sync()
    b = torch.randn(4, device="jax")
    assert (a.tolist(), b.tolist()) == want
    torch.manual_seed(0)
    first = torch.rand(4, device="jax")
    torch.manual_seed(0)
    second = torch.rand(4, device="jax")
    torch.manual_seed(123)  # does not reach back
    assert first.tolist() == second.tolist() == want[0]


def test_the_random_state_can_be_saved_and_forked():
    module = torch.get_device_module("jax")
    torch.manual_seed(0)
    state = module.get_rng_state()
    want = torch.rand(4, device="jax").tolist()
    for named in ({"devices": [0]}, {}):
        module.set_rng_state(state)
        with torch.random.fork_rng(device_type="jax", **named):
            torch.manual_seed(99)
            torch.rand(4, device="jax")
        assert torch.equal(module.get_rng_state(), state)
        assert torch.rand(4, device="jax").tolist() == want


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
    x = torch.ones(8, 8, device="jax")
    want = noisy_runs(Noisy(), x)
    assert noisy_runs(xs.compile(Noisy()), x) == want
    sharded = xs.mark_sharding(torch.ones(8, 8, device="jax"), mesh, (("y", "x"), None))
    assert noisy_runs(xs.compile(Noisy()), sharded) == want


@pytest.mark.parametrize(("reentrant", "compiled"), [(False, True), (True, False)])
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


def test_a_state_that_a_compiled_step_forks_or_sets_is_that_of_every_call():
    module = torch.get_device_module("jax")
    torch.manual_seed(7)
    state = module.get_rng_state()

    def forks(x):
        before = x + torch.rand(4, device="jax")
        with torch.random.fork_rng(devices=[0], device_type="jax"):
            inside = torch.rand(4, device="jax")
        return before, inside, torch.rand(4, device="jax")

    def seeds(x):
        before = x + torch.rand(4, device="jax")
        torch.manual_seed(5)
        return before, torch.rand(4, device="jax")

    def sets(x):
        module.set_rng_state(state)
        return (x + torch.rand(4, device="jax"),)

    x = torch.zeros(4, device="jax")
    for step, seed in ((forks, 1), (seeds, 6), (sets, 3)):
        torch.manual_seed(seed)
        want = [[part.tolist() for part in step(x)] for _ in range(3)]
        torch.manual_seed(seed)
        compiled = xs.compile(step)
        got = [[part.tolist() for part in compiled(x)] for _ in range(3)]
        assert got == want, (step, seed)
        if step is forks:
            assert [inside == after for _, inside, after in got] == [True] * 3


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
