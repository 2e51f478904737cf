"""What torch code and Flax modules depend on beside their arguments."""

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import linen, nnx

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.interop.assume_pure import PureModule


class Dropping(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        return linen.Dropout(0.5, deterministic=not train)(x)


MODULES = {
    "NNX": lambda: iso.torch_module(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
    "Linen": lambda: iso.torch_module(Dropping(), {}, rngs=jax.random.key(0)),
    "in a Sequential": lambda: torch.nn.Sequential(
        iso.torch_module(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    ),
    "PureModule": lambda: PureModule(torch.nn.BatchNorm1d(4).to("jax")),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_captured_step_sees_the_mode_of_a_module(kind):
    step_of = {}
    for way in ("lazy", "captured"):
        module = MODULES[kind]()
        call = lambda x, module=module: module(x)  # noqa: E731
        step_of[way] = module, xs.compile(call) if way == "captured" else call
    batch = torch.arange(32.0, device="jax").view(8, 4) + 1
    for trains in (True, True, False, False, True):
        found = {}
        for way, (module, step) in step_of.items():
            module.train(trains)
            found[way] = step(batch).cpu()
        if kind in ("NNX", "Linen"):
            kept = {way: (one == batch.cpu()).all().item() for way, one in found.items()}
            assert kept == dict.fromkeys(found, not trains)
        else:
            torch.testing.assert_close(found["captured"], found["lazy"])


DRAWS = {
    "randn": lambda x: x + torch.randn(2),
    "randperm": lambda x: x[torch.randperm(2)],
    "normal_": lambda x: x + torch.empty(2).normal_(),
    "dropout on the CPU": lambda x: x * torch.nn.functional.dropout(torch.ones(2)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_of_the_cpu_are_refused(draw):
    f = iso.jax_function(DRAWS[draw])
    for run in (f, jax.jit(f), jax.grad(lambda x: f(x).sum())):
        with pytest.raises(RuntimeError, match=r"draws random numbers on the CPU.*device=x.device"):
            run(jnp.ones(2))
    known = iso.jax_function(lambda x: x + torch.randn(2, device=x.device))
    first, other = (jax.jit(known)(jnp.ones(2), rng=jax.random.key(n)) for n in (0, 1))
    assert first.tolist() != other.tolist()


def test_forces_are_gradients_inside_the_function():
    def forces(x):
        energy = (x**3).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]

    f, x = iso.jax_function(forces), jnp.arange(3.0)
    assert f(x).tolist() == jax.jit(f)(x).tolist() == [0, -3, -12]
    assert jnp.diag(jax.jacobian(f)(x)).tolist() == [0, -6, -12]
