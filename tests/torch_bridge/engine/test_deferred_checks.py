"""What is wrong with values that only a program knows is told where one is read."""

import jax
import jax.numpy as jnp
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

LARGE = 2**40
REST = iso.torch_function(lambda i: i % 1009, name="rest")


def lazily(values):
    return REST(values)


WAYS = {
    "lazily": lazily,
    "computed": lambda values: REST(values + 0) * 1,
    "step": xs.compile(lambda values: REST(values)),
    "step with loops": xs.compile(lambda values: REST(values * 1), repeat="auto"),
    "torch.compile": torch.compile(lambda values: REST(values), backend="isoshard"),
}


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_integers_that_do_not_fit_are_refused(way, on_mesh):
    def given(factor):
        values = torch.arange(8) * factor
        mesh = iso.make_mesh((8,), ("x",))
        return iso.shard(values, mesh, iso.P("x")) if on_mesh else values.to("jax")

    for factor in (1, 2, LARGE, 3):
        if factor == LARGE:
            with pytest.raises(
                iso.errors.CopyError, match="rest was given int64 values that do not fit"
            ):
                WAYS[way](given(factor)).tolist()
        else:
            assert WAYS[way](given(factor)).tolist() == [factor * i % 1009 for i in range(8)]
    with jax.enable_x64(True):
        assert WAYS[way](given(LARGE)).tolist() == [LARGE * i % 1009 for i in range(8)]


def test_effects_of_results_that_are_dropped():
    seen = []

    def told(x):
        jax.debug.callback(seen.append, x.sum())
        return x * 2

    told = iso.torch_function(told)
    x = torch.ones(3, device="jax")
    told(x)
    (x + 1).tolist()
    jax.effects_barrier()
    step = xs.compile(lambda x: (told(x), x + 1)[1])
    for _ in range(3):
        step(x)
    jax.effects_barrier()
    assert len(seen) == 4


def test_results_may_be_written_to():
    x = torch.ones(2, device="jax", requires_grad=True)
    y = iso.torch_function(lambda x: x)(x)
    y.mul_(2).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_a_function_without_a_gradient_says_how_to_call_it():
    def f(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = torch.ones(2, device="jax", requires_grad=True)
    with pytest.raises(ValueError) as caught:
        iso.torch_function(f, name="f")(x)
    assert "call it under torch.no_grad(), or with x.detach()" in caught.value.__notes__[-1]
    assert iso.torch_function(f)(x.detach()).tolist() == jnp.ones(2).tolist()
