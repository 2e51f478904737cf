"""Floats that are inputs of a program are refused at each call, not at the first of their kind."""

from __future__ import annotations

import math

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.signatures import number_checks
from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.engine.spelled_calls import calls, outcome

NAN, INF = math.nan, math.inf

# the call, then numbers that torch takes, and numbers that it refuses
DRAWS = """
    ones(3).exponential_(n) | 0.5, INF | -1.0, 0.0, NAN
    ones(3).cauchy_(0.5, n) | 2.0, | -1.0, 0.0, NAN; ones(3).cauchy_(sigma=n) | 2.0, | -1.0,
    ones(3).log_normal_(0.5, n) | 1.0, | -1.0, 0.0, NAN; ones(3).log_normal_(std=n) | 1.0, | -1.0,
    ones(3).geometric_(n) | 0.5, | 0.0, 1.0, 2.0, NAN
    ones(3).bernoulli_(n) | 0.0, 0.5, 1.0 | -0.1, 1.1, NAN
    torch.bernoulli(ones(3), n) | 0.5, | -0.1, 1.1; ones(3).normal_(0.5, n) | 0.0, 2.0 | -1.0, NAN
    ones(3).normal_(std=n) | 0.0, 2.0 | -1.0,; torch.normal(ones(3), n) | 0.0, 2.0 | -1.0, NAN
    torch.normal(0.5, n, (3,), device=d) | 2.0, | -1.0,
    torch.normal(0.5, n, (3,), out=ones(3)) | 2.0, | -1.0,
    ones(3).uniform_(0.5, n) | 0.5, 9.0 | 0.0, NAN, INF, 1e39
    ones(3).uniform_(n, 1.0) | 0.5, | 2.0, NAN, -INF, -1e39; ones(3).uniform_(-n, n) | 1.0, | 3e38,
    aten.exponential(ones(3), n) | 0.5, | -1.0,
    aten.uniform.out(ones(3), 0.5, n, out=ones(3)) | 1.0, | 0.0, 1e39
    ones(4)[1:].exponential_(n) | 0.5, | -1.0,; ones(0).exponential_(n) | 0.5, | -1.0,
"""
HELD = """
    ones(3).fill_(n); torch.fill(ones(3), n); torch.full((3,), n, device=d, dtype=float32)
    torch.full((3,), n, out=ones(3)); torch.full_like(ones(3), n); ones(3).new_full((3,), n)
    ones(3).masked_fill(bools(1, 0, 1), n); ones(3).masked_fill_(bools(1, 0, 1), n)
    torch.where(bools(1, 0, 1), ones(3), n); ones(3).scatter(0, ints(0, 2), n)
    ones(3).scatter_(0, ints(0, 2), n); ones(3).index_fill_(0, ints(0, 2), n)
    ones(3).index_add(0, ints(0, 2), ones(2), alpha=n); ones(2, 2).fill_diagonal_(n)
    torch.add(ones(3), ones(3), alpha=n); ones(3).add_(ones(3), alpha=n)
    torch.sub(ones(3), ones(3), alpha=n); torch.addcmul(ones(3), ones(3), ones(3), value=n)
    ones(3).addcdiv_(ones(3), ones(3), value=n); torch.lerp(ones(3), ones(3), n)
    torch.addmm(ones(2, 2), ones(2, 2), ones(2, 2), alpha=n)
    torch.addmm(ones(2, 2), ones(2, 2), ones(2, 2), beta=n, out=ones(2, 2))
    torch.addmv(ones(2), ones(2, 2), ones(2), alpha=n)
    torch.addr(ones(2, 2), ones(2), ones(2), beta=n); torch.linspace(0.5, n, 3, device=d)
    torch._foreach_add([ones(3)], [ones(3)], alpha=n)
    torch._foreach_addcmul([ones(3)], [ones(3)], [ones(3)], n)
    torch._foreach_lerp([ones(3)], [ones(3)], n)
"""
CALLS = [line.split(" | ") for line in calls(DRAWS)]
CALLS += [[line, "3e38, INF, NAN", "1e39, -1e39"] for line in calls(HELD)]


def refused(call: str, device: str, number: float, **more: object) -> str:
    """The message with which a call refuses a number; empty if it takes it."""
    error = outcome(call, device, n=number, **more)
    assert not isinstance(error, Exception) or isinstance(error, RuntimeError), error
    return str(error) if isinstance(error, Exception) else ""


def test_numbers_are_looked_at_in_every_call():
    """Valid then invalid, and invalid then valid, as on the CPU."""
    for call, *texts in CALLS:
        good, bad = (eval(f"({text})", {"NAN": NAN, "INF": INF}) for text in texts)
        assert all(refused(call, "cpu", number) for number in bad), call
        for number in (*good, *bad, *good, *bad):
            wanted, message = refused(call, "cpu", number), refused(call, "jax", number)
            assert bool(message) == bool(wanted), f"{call} of {number}: {message}"
            if message:
                assert any(w in message for w in ("expects", "bounds", "cannot be converted"))


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
    for call in ("ones(3, dtype=t).fill_(n)", "ones(3, dtype=t).masked_fill_(bools(1, 0, 1), n)"):
        for number in (*good, *bad):
            for message in (refused(call, device, number, t=dtype) for device in ("cpu", "jax")):
                assert ("without overflow" in message) == (number in bad), (call, number)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "int8_t"),
        (torch.int16, "int16_t"),
        (torch.int32, "int"),
        (torch.uint8, "uint8_t"),
    ],
)
def test_the_message_names_the_type_as_torchs_does(dtype, name):
    for device in ("cpu", "jax"):
        with pytest.raises(RuntimeError, match=f"converted to type {name} without overflow"):
            torch.zeros(2, dtype=dtype, device=device).fill_(2**40)


def test_halves_multiply_by_what_their_products_are_computed_in():
    """A factor of a 16-bit product may be larger than 16 bits hold; and a tensor rounds."""
    outcomes = []
    for device in ("cpu", "jax"):
        x = torch.ones(3, dtype=torch.float16, device=device)
        torch.addcmul(x, x, x, value=1e5)
        with pytest.raises(RuntimeError, match="without overflow"):
            torch.add(x, x, alpha=1e5)
        x[0] = -1e9
        assert x.isinf().sum().item() == 1
        try:  # where a mask is written, torch looks at the number from 2.15 on
            x[torch.tensor([True, False, True], device=device)] = -1e9
        except RuntimeError as error:
            assert "without overflow" in str(error)
        outcomes.append(x.cpu())
    assert torch.equal(*outcomes)


BOUNDED = """
    x.clamp(max=n); x.clamp_min(n); x.clamp_(-abs(n), abs(n)); F.hardtanh(x, -abs(n), abs(n))
    torch._foreach_clamp_max([x], [n])[0]
"""


def test_a_float_holds_its_bounds():
    """They became infinite, without a word."""
    cases = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for n, bound in enumerate((65519, 1e5, 1e38, 3.4e38, -3.402824e38, 1e300, INF, -INF)):
            for call in calls(BOUNDED)[n % 2 :: 2]:
                x = torch.ones(3, dtype=dtype)
                want, got = (
                    outcome(call, d, x=x.to(d, copy=True), n=bound) for d in ("cpu", "jax")
                )
                cases.append(((call, dtype, bound), want, got))
    xs.sync()
    for name, want, got in cases:
        if isinstance(want, Exception):
            assert type(got) is type(want), name
            assert "without overflow" in str(got), name
        else:
            assert torch.equal(got.cpu(), want), name


def test_refused_numbers_leave_tensors_as_they_are():
    """Nothing is recorded, and nothing is drawn."""
    x = torch.ones(3, device="jax")
    torch.manual_seed(3)
    expected = torch.rand(3, device="jax").cpu()
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


def test_captured_steps_and_torch_compile_look_again():
    """A number that changes between replays is looked at in each."""
    x = torch.ones(3, device="jax")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3, device="jax"))], lr=0.5)
    (group,) = optimizer.param_groups
    step = xs.compile(lambda x: torch.add(x, x, alpha=group["lr"]))
    for rate in (0.5, 0.25, 1e39, 2.0, -1e39, 3.0):
        group["lr"] = rate
        if abs(rate) > 1e38:
            with pytest.raises(RuntimeError, match="without overflow"):
                step(x)
        else:
            assert step(x).tolist() == [1 + rate] * 3
    compiled = torch.compile(lambda x, rate: x.clone().exponential_(rate), backend="isoshard")
    compiled(x, 0.5)
    with pytest.raises(RuntimeError, match=r"lambda > 0\.0"):
        compiled(x, -1.0)


def test_every_lifted_number_is_known_to_be_checked_or_free():
    """An operator that begins to lift a number has to say whether torch looks at it."""
    lifted = {
        name.removeprefix("aten::").partition(".")[0]
        for name in registry.names()
        if name.startswith("aten::") and registry.named(name).lift
    }
    checked = {*number_checks._PARAMETERS, *number_checks._CONVERTED, "uniform"}
    # Rounded to infinity as a tensor of one number, or a float64 all along.
    free = {"mul", "div", "floor_divide", "lt", "le", "gt", "ge", "eq", "ne"}
    free |= {"_batch_norm_with_update", "_batch_norm_with_update_functional"}
    free |= {"_native_batch_norm_legit_functional", "_native_batch_norm_legit"}
    free |= {"native_batch_norm", "native_dropout_backward"}
    free |= {"fake_quantize_per_tensor_affine_cachemask"}
    rest = lifted - checked - free
    assert not {name for name in rest if not name.startswith(("_foreach_", "_fused"))}


def test_floats_hold_whole_numbers_beyond_32_bits():
    """`random_` draws from ranges of 64 bits into floats of 32."""
    with pytest.warns(UserWarning, match="out of bounds"):
        drawn = torch.ones(2000, device="jax").random_(0, 2**40).cpu()
    assert drawn.max() > 2**39
    assert abs(drawn.mean().item() / 2**39 - 1) < 0.1
