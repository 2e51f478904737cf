"""What cannot be, in torch."""

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from isoshard.core.errors import ShardingError, SpecError

X = torch.arange(8.0)


def called(handler, *args, function=torch.relu, **options):
    with xs.register_function_handler(function, handler, **options):
        return function(*args)


@pytest.fixture
def x():
    return iso.shard(X, make_mesh((4,), ("x",)), P("x"))


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (lambda s, x: x, ShardingError, "the handler of relu returned a XLASharded.* a pair"),
        (lambda s, x: (x[:1], P("x")), ShardingError, r"float32\[4\] in all.* gives float32\[8\]"),
        (lambda s, x: (x.double().int(), P("x")), ShardingError, "a wrong local shape or dtype"),
        (lambda s, x: (x, P("z")), SpecError, "no mesh axis is called 'z'"),
        (lambda s, x: (s.all_reduce(x, "z"), P("x")), ShardingError, "no mesh axis is called 'z'"),
        (lambda s, x: (s.all_reduce(1.0, "x"), P()), ShardingError, "got a float; make it a"),
        (lambda s, x: (x, s.like(x * 1, 0)), ShardingError, "got an array computed from others"),
        (lambda s, x: (x, s.uneven(P("x"), [(2, 2, 2, 1)])), ShardingError, r"float32\[7\] in all"),
        (lambda s, x: (torch.rand(2), P("x")), RuntimeError, "draws random numbers"),
    ],
)
def test_handlers_that_do_not_fit(handler, kind, message, x):
    if kind is RuntimeError:
        handler = lambda s, x: (torch.rand_like(x), P("x"))  # noqa: E731
    with pytest.raises(kind, match=message):
        called(handler, x)
    assert x.cpu().tolist() == X.tolist()  # nothing is left behind


def test_arguments_and_results_that_cannot_be(x, mesh):
    with pytest.raises(ShardingError, match="gives blocks of unequal sizes, and all its arguments"):
        called(lambda s, x: (x, s.uneven(P("x"), [(2, 2, 2, 1)])), x, check=False)
    with pytest.raises(ShardingError, match="JAX cannot prove it"):
        called(lambda s, x: (x.sum(), P()), x, function=torch.sum)
    other = iso.shard(X, mesh, P("x"))
    with pytest.raises(ShardingError, match=r"2 different meshes: argument 0 on 'x' \(4\); arg"):
        called(lambda s, a, b: (a, P("x")), x, other, function=torch.add)
    with pytest.raises(TypeError, match="hashable arguments, and got a ndarray"):
        called(lambda s, a, **_: (a, P("x")), x, np.ones(8), function=torch.nn.functional.normalize)
    with pytest.raises(TypeError, match="several devices"):
        called(lambda s, a, b: (a, P("x")), x, X, function=torch.add)
    out = torch.zeros(8, device="jax")
    with (
        xs.register_function_handler(torch.add, lambda s, a, b, out: (a, P("x"))),
        pytest.raises(ShardingError, match="cannot write to out="),
    ):
        torch.add(x, x, out=out)


def test_functions_that_cannot_have_one():
    with pytest.raises(TypeError, match="torch never checks for overrides of zeros"):
        xs.register_function_handler(torch.zeros, print)
    with pytest.raises(TypeError, match=r"relu_ writes to its argument.* one for relu"):
        xs.register_function_handler(torch.relu_, print)
    with pytest.raises(TypeError, match="the function is a str"):
        xs.register_function_handler("dot", print)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardingError, match="framework 'numpy' is none of 'torch' and 'jax'"):
        xs.register_function_handler(torch.dot, print, framework="numpy")


def test_a_function_that_meta_tensors_do_not_run(x):
    from torch.overrides import handle_torch_function, has_torch_function

    def signed(x):
        if has_torch_function((x,)):
            return handle_torch_function(signed, (x,), x)
        return x if x.sum().item() > 0 else -x

    def handler(shards, x):
        total = shards.all_reduce(x.sum(), "x")
        return torch.where(total > 0, x, -x), shards.like(x, 0)

    with pytest.raises(ShardingError, match=r"cannot be run on meta tensors.* with check=False"):
        called(handler, x, function=signed)
    assert called(handler, x, function=signed, check=False).cpu().tolist() == X.tolist()
    assert signed(x).cpu().tolist() == X.tolist()
