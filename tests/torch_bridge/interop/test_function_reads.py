"""What the function behind `torch_function` reads may change between calls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import isoshard as iso
import isoshard.torch_bridge as xs

FACTOR = 2.0


class Scale:
    factor = 2.0

    def __call__(self, x):
        return x * self.factor


def a_global():
    def change():
        global FACTOR
        FACTOR += 1.0

    return lambda x: x * FACTOR, change


def a_list():
    kept = [2.0]
    return lambda x: x * kept[0], lambda: kept.__setitem__(0, 5.0)


def an_array():
    kept = np.full(2, 2, np.float32)
    return lambda x: x * kept, lambda: kept.__setitem__(0, 7)


def an_array_of_jax():
    kept = {"a": jnp.ones(2)}
    return lambda x: x * kept["a"], lambda: kept.update(a=jnp.full(2, 3.0))


def a_method():
    scale = Scale()
    return scale.__call__, lambda: setattr(scale, "factor", 3.0)


def an_argument_in_part():
    scale = Scale()
    function = functools.partial(lambda scale, x: x * scale.factor, scale)
    return function, lambda: setattr(scale, "factor", 3.0)


def an_nnx_module():
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return module, lambda: module.kernel.__setitem__(..., module.kernel[...] * 3)


def a_torch_module():
    module = torch.nn.Linear(2, 2)
    function = iso.jax_function(module)
    return lambda x: function(function.params, x), lambda: module.weight.data.mul_(3)


def a_mode():
    module = torch.nn.BatchNorm1d(2).eval()
    function = iso.jax_function(module)
    return lambda x: function(function.params, x), module.train


READS = (
    *(a_global, a_list, an_array, an_array_of_jax, a_method, an_argument_in_part, an_nnx_module),
    *(a_torch_module, a_mode),
)
WAYS = {
    "lazily": ("jax", lambda f: f),
    "on the CPU": ("cpu", lambda f: f),
    "in a step": ("jax", lambda f: xs.compile(lambda x: f(x))),
    "under torch.func": ("jax", lambda f: lambda x: torch.func.vjp(f, x)[0]),
    "with a gradient": ("jax", lambda f: lambda x: f(x.requires_grad_()).detach()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", READS)
def test_a_change_is_seen(read, way):
    device, run = WAYS[way]
    function, change = read()
    known = iso.torch_function(function)
    call = run(known)
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], device=device)
    first = [call(x).tolist() for _ in range(2)]
    change()
    found = call(x).cpu().numpy()
    np.testing.assert_allclose(found, function(jnp.asarray(x.detach().cpu().numpy())), rtol=1e-5)
    assert first[0] == first[1] != found.tolist()


def test_what_was_met_before_is_not_traced_again():
    scale, traces = Scale(), itertools.count()
    known = iso.torch_function(lambda x: (next(traces), x * scale.factor)[1])
    x = torch.ones(1, device="jax")
    for factor in (2.0, 3.0, 2.0, 3.0, 2.0):
        scale.factor = factor
        assert known(x).item() == factor
    assert next(traces) == 2


def test_gradients_of_gradients_are_of_the_function_that_was_called():
    scale = Scale()
    known = iso.torch_function(lambda x: (x**3 * scale.factor).sum())
    x = torch.ones(2, device="jax", requires_grad=True)
    y = known(x)
    scale.factor = 100.0
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), x)[0].tolist() == [12.0, 12.0]


def test_what_listens_to_events_of_jax_is_not_read_by_the_function():
    told, traces = [], itertools.count()

    def listen(event, seconds, **_):
        told.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        known = iso.torch_function(lambda x: (next(traces), jnp.sin(x) + 1)[1])
        for size in (1.0, 2.0, 3.0):
            known(torch.ones(2, device="jax"))
            jax.jit(lambda x, size=size: x + size)(1.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert next(traces) == 1 and told


def test_a_branch_that_is_met_later_is_watched_too():
    """Under `torch.func` as well: each trace may read what no other did."""
    scale = Scale()
    known = iso.torch_function(lambda x: x * scale.factor if x.shape[0] > 2 else x)
    for run in (known, lambda x: torch.func.vjp(known, x)[0], torch.func.jacrev(known)):
        scale.factor = 2.0
        run(torch.ones(2, device="jax"))
        run(torch.ones(3, device="jax"))
        scale.factor = 5.0
        assert run(torch.ones(3, device="jax")).max().item() == 5
