"""Floats that are inputs of a program are refused at each call, not at the first of their kind."""

from __future__ import annotations

import math

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.lowerings import registry

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


def ones(device, *size, dtype=torch.float32):
    """A tensor of ones."""
    return torch.ones(size, dtype=dtype, device=device)


def bools(device):
    """A mask of three."""
    return torch.tensor([True, False, True], device=device)


def places(device):
    """Two places among three."""
    return torch.tensor([0, 2], device=device)


def matrix(device):
    """Ones, two by two."""
    return ones(device, 2, 2)


# name: (the call, numbers that torch takes, numbers that it refuses)
DRAWS = {
    "exponential_": (lambda d, n: ones(d, 3).exponential_(n), (0.5, INF), (-1.0, 0.0, NAN)),
    "cauchy_": (lambda d, n: ones(d, 3).cauchy_(0.5, n), (2.0,), (-1.0, 0.0, NAN)),
    "cauchy_ named": (lambda d, n: ones(d, 3).cauchy_(sigma=n), (2.0,), (-1.0,)),
    "log_normal_": (lambda d, n: ones(d, 3).log_normal_(0.5, n), (1.0,), (-1.0, 0.0, NAN)),
    "log_normal_ named": (lambda d, n: ones(d, 3).log_normal_(std=n), (1.0,), (-1.0,)),
    "geometric_": (lambda d, n: ones(d, 3).geometric_(n), (0.5,), (0.0, 1.0, 2.0, NAN)),
    "bernoulli_": (lambda d, n: ones(d, 3).bernoulli_(n), (0.0, 0.5, 1.0), (-0.1, 1.1, NAN)),
    "bernoulli": (lambda d, n: torch.bernoulli(ones(d, 3), n), (0.5,), (-0.1, 1.1)),
    "normal_": (lambda d, n: ones(d, 3).normal_(0.5, n), (0.0, 2.0), (-1.0, NAN)),
    "normal_ named": (lambda d, n: ones(d, 3).normal_(std=n), (0.0, 2.0), (-1.0,)),
    "normal": (lambda d, n: torch.normal(ones(d, 3), n), (0.0, 2.0), (-1.0, NAN)),
    "normal, a size": (lambda d, n: torch.normal(0.5, n, (3,), device=d), (2.0,), (-1.0,)),
    "normal, out": (lambda d, n: torch.normal(0.5, n, (3,), out=ones(d, 3)), (2.0,), (-1.0,)),
    "uniform_ to": (lambda d, n: ones(d, 3).uniform_(0.5, n), (0.5, 9.0), (0.0, NAN, INF, 1e39)),
    "uniform_ from": (lambda d, n: ones(d, 3).uniform_(n, 1.0), (0.5,), (2.0, NAN, -INF, -1e39)),
    "uniform_ both": (lambda d, n: ones(d, 3).uniform_(-n, n), (1.0,), (3e38,)),
    "exponential": (lambda d, n: aten.exponential(ones(d, 3), n), (0.5,), (-1.0,)),
    "uniform, out": (
        lambda d, n: aten.uniform.out(ones(d, 3), 0.5, n, out=ones(d, 3)),
        (1.0,),
        (0.0, 1e39),
    ),
    "a view": (lambda d, n: ones(d, 4)[1:].exponential_(n), (0.5,), (-1.0,)),
    "nothing": (lambda d, n: ones(d, 0).exponential_(n), (0.5,), (-1.0,)),
}
FLOATS, WIDE = (3e38, INF, NAN), (1e39, -1e39)
HELD = {
    "fill_": lambda d, n: ones(d, 3).fill_(n),
    "fill": lambda d, n: torch.fill(ones(d, 3), n),
    "full": lambda d, n: torch.full((3,), n, device=d, dtype=torch.float32),
    "full, out": lambda d, n: torch.full((3,), n, out=ones(d, 3)),
    "full_like": lambda d, n: torch.full_like(ones(d, 3), n),
    "new_full": lambda d, n: ones(d, 3).new_full((3,), n),
    "masked_fill": lambda d, n: ones(d, 3).masked_fill(bools(d), n),
    "masked_fill_": lambda d, n: ones(d, 3).masked_fill_(bools(d), n),
    "where": lambda d, n: torch.where(bools(d), ones(d, 3), n),
    "scatter": lambda d, n: ones(d, 3).scatter(0, places(d), n),
    "scatter_": lambda d, n: ones(d, 3).scatter_(0, places(d), n),
    "index_fill_": lambda d, n: ones(d, 3).index_fill_(0, places(d), n),
    "index_add": lambda d, n: ones(d, 3).index_add(0, places(d), ones(d, 2), alpha=n),
    "fill_diagonal_": lambda d, n: matrix(d).fill_diagonal_(n),
    "add": lambda d, n: torch.add(ones(d, 3), ones(d, 3), alpha=n),
    "add_": lambda d, n: ones(d, 3).add_(ones(d, 3), alpha=n),
    "sub": lambda d, n: torch.sub(ones(d, 3), ones(d, 3), alpha=n),
    "addcmul": lambda d, n: torch.addcmul(ones(d, 3), ones(d, 3), ones(d, 3), value=n),
    "addcdiv_": lambda d, n: ones(d, 3).addcdiv_(ones(d, 3), ones(d, 3), value=n),
    "lerp": lambda d, n: torch.lerp(ones(d, 3), ones(d, 3), n),
    "addmm": lambda d, n: torch.addmm(matrix(d), matrix(d), matrix(d), alpha=n),
    "addmm, out": lambda d, n: torch.addmm(matrix(d), matrix(d), matrix(d), beta=n, out=matrix(d)),
    "addmv": lambda d, n: torch.addmv(ones(d, 2), matrix(d), ones(d, 2), alpha=n),
    "addr": lambda d, n: torch.addr(matrix(d), ones(d, 2), ones(d, 2), beta=n),
    "linspace": lambda d, n: torch.linspace(0.5, n, 3, device=d),
    "foreach add": lambda d, n: torch._foreach_add([ones(d, 3)], [ones(d, 3)], alpha=n),
    "foreach addcmul": lambda d, n: torch._foreach_addcmul(*[[ones(d, 3)]] * 3, n),
    "foreach lerp": lambda d, n: torch._foreach_lerp([ones(d, 3)], [ones(d, 3)], n),
}
CALLS = {**DRAWS, **{name: (call, FLOATS, WIDE) for name, call in HELD.items()}}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_are_looked_at_in_every_call(name):
    """Valid then invalid, and invalid then valid, as on the CPU."""
    call, good, bad = CALLS[name]
    for number in bad:
        with pytest.raises(RuntimeError):
            call("cpu", number)
    for first, second in ((good, bad), (bad, good)):
        for number in (*first, *second, *first):
            if number in bad or (number != number and any(one != one for one in bad)):
                with pytest.raises(RuntimeError, match=r"expects|bounds|cannot be converted"):
                    call("jax", number)
            else:
                call("cpu", number)
                call("jax", number)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (torch.float16, (65504.0, INF, NAN), (7e4, -7e4)),
        (torch.bfloat16, (3e38, -INF), (3.4e38,)),
        (torch.float64, (1e300, NAN), ()),
        (torch.int8, (127.0, -128.0, 3.7), (128.0, -129.0, 300.7, NAN, INF)),
        (torch.uint8, (255.0,), (256.0, -1.0)),
        (torch.int32, (2e9,), (1e10, NAN)),
        (torch.bool, (1e39, NAN), ()),
        (torch.complex64, (3e38, INF), (1e39,)),
    ],
)
def test_each_dtype_holds_its_own_numbers(dtype, good, bad):
    """The bounds are those of the dtype that is written."""
    for number in (*good, *bad):
        for device in ("cpu", "jax"):
            x = ones(device, 3, dtype=dtype)
            for write in (x.fill_, lambda n, x=x: x.masked_fill_(bools(x.device), n)):
                if number in bad or (number != number and NAN in bad):
                    with pytest.raises(RuntimeError, match="without overflow"):
                        write(number)
                else:
                    write(number)


def test_halves_multiply_by_what_their_products_are_computed_in():
    """A factor of a 16-bit product may be larger than 16 bits hold."""
    for device in ("cpu", "jax"):
        x = ones(device, 3, dtype=torch.float16)
        torch.addcmul(x, x, x, value=1e5)
        with pytest.raises(RuntimeError, match="without overflow"):
            torch.add(x, x, alpha=1e5)


def test_what_is_written_by_way_of_a_tensor_rounds():
    """Where a mask is written, torch looks at the number from 2.15 on."""
    outcomes = []
    for device in ("cpu", "jax"):
        x = ones(device, 3, dtype=torch.float16)
        x[0] = -1e9
        assert x.isinf().sum().item() == 1
        try:
            x[bools(device)] = -1e9
        except RuntimeError as error:
            assert "without overflow" in str(error)
        outcomes.append(x.cpu())
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [65519, 1e5, 1e38, 3.4e38, -3.402824e38, 1e300, INF, -INF])
def test_a_float_holds_its_bounds(dtype, bound):
    """They became infinite, without a word."""
    calls = {
        "clamp": lambda x: x.clamp(max=bound),
        "clamp_min": lambda x: x.clamp_min(bound),
        "clamp_": lambda x: x.clamp_(-abs(bound), abs(bound)),
        "hardtanh": lambda x: torch.nn.functional.hardtanh(x, -abs(bound), abs(bound)),
        "foreach": lambda x: torch._foreach_clamp_max([x], [bound])[0],
    }
    for name, call in calls.items():
        found = []
        for device in ("cpu", "jax"):
            try:
                found.append(call(ones(device, 3, dtype=dtype)).cpu())
            except RuntimeError as error:
                found.append(type(error))
                assert "without overflow" in str(error)
        if isinstance(found[0], torch.Tensor):
            assert torch.equal(*found), name
        else:
            assert found[0] is found[1], name


def test_refused_numbers_leave_tensors_as_they_are():
    """Nothing is recorded, and nothing is drawn."""
    x = ones("jax", 3)
    torch.manual_seed(3)
    expected = torch.rand(3, device="jax").cpu()
    torch.manual_seed(3)
    x.clone().exponential_(2.0)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match=r"lambda > 0.0, but found lambda=-2"):
        x.exponential_(-2.0)
    assert torch.equal(torch.rand(3, device="jax").cpu(), expected)
    assert torch.equal(x.cpu(), torch.ones(3))


def test_on_a_mesh():
    """Layouts change nothing."""
    mesh = iso.make_mesh((8,), ("x",))
    x = iso.shard(torch.ones(16), mesh, ("x",))
    x.uniform_(0.0, 2.0)
    with pytest.raises(RuntimeError, match=r"from=0 > to=-2"):
        x.uniform_(0.0, -2.0)
    with pytest.raises(RuntimeError, match=r"p to be in \[0, 1\]"):
        x.bernoulli_(1.5)
    assert x.bernoulli_(0.5).cpu().unique().numel() <= 2


def test_captured_steps_look_again():
    """A number that changes between replays is looked at in each."""
    x = ones("jax", 3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(ones("jax", 3))], lr=0.5)
    (group,) = optimizer.param_groups
    step = xs.compile(lambda x: torch.add(x, x, alpha=group["lr"]))
    for rate in (0.5, 0.25, 1e39, 2.0, -1e39, 3.0):
        group["lr"] = rate
        if abs(rate) > 1e38:
            with pytest.raises(RuntimeError, match="without overflow"):
                step(x)
        else:
            assert step(x).tolist() == [1 + rate] * 3


def test_torch_compile_refuses_too():
    """Dynamo traces the function again for each number of a draw."""
    compiled = torch.compile(lambda x, rate: x.clone().exponential_(rate), backend="isoshard")
    compiled(ones("jax", 3), 0.5)
    with pytest.raises(RuntimeError, match=r"lambda > 0\.0"):
        compiled(ones("jax", 3), -1.0)


def test_every_lifted_number_is_known_to_be_checked_or_free():
    """An operator that begins to lift a number has to say whether torch looks at it."""
    lifted = {
        name.removeprefix("aten::").partition(".")[0]
        for name in registry.names()
        if name.startswith("aten::") and registry.named(name).lift
    }
    from isoshard.torch_bridge.engine.signatures import number_checks

    checked = {*number_checks._PARAMETERS, *number_checks._CONVERTED, "uniform"}
    # Rounded to infinity as a tensor of one number, or a float64 all along.
    free = {"mul", "div", "floor_divide", "lt", "le", "gt", "ge", "eq", "ne"}
    free |= {"_batch_norm_with_update", "_batch_norm_with_update_functional"}
    free |= {"_native_batch_norm_legit_functional", "_native_batch_norm_legit"}
    free |= {"native_batch_norm", "native_dropout_backward"}
    rest = {
        name for name in lifted - checked - free if not name.startswith(("_foreach_", "_fused"))
    }
    assert not rest


def test_floats_hold_whole_numbers_beyond_32_bits():
    """`random_` draws from ranges of 64 bits into floats of 32."""
    with pytest.warns(UserWarning, match="out of bounds"):
        drawn = ones("jax", 2000).random_(0, 2**40).cpu()
    assert drawn.max() > 2**39
    assert abs(drawn.mean().item() / 2**39 - 1) < 0.1
