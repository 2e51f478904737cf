"""List operators against CPU torch: mixed dtypes and shapes in one list, every overload."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import evaluate, together

aten = torch.ops.aten
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow")
UNARY = sorted(
    name.removeprefix("_foreach_")
    for name in (full.removeprefix("aten::") for full in registry.names())
    if name.startswith("_foreach_") and "." not in name and hasattr(aten, name)
)
PRECISE = {"rtol": 1e-2, "atol": 1e-2}
"""Results in bfloat16 may differ in the last of their 8 bits."""


def op(name: str, overload: str = "default"):
    return getattr(getattr(aten, f"_foreach_{name}"), overload)


def tensors(seed: int = 0) -> list[torch.Tensor]:
    """Values in (0.5, 1), where every function and power is defined."""
    source = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(shape, generator=source) / 2 + 0.5  # noqa: E731
    return [draw(3, 4), draw(), draw(0, 2), draw(5).bfloat16()]


def filled() -> list[torch.Tensor]:
    return [x for x in tensors() if x.numel()]


def test_unary():
    with together(**PRECISE) as check:
        for name in UNARY:
            if name not in ("copy", "max", "mm"):
                check(op(name), tensors()[1::2])
        check(op("exp"), tensors())
        for name in ("exp", "sqrt", "neg", "abs"):
            check(op(name), [torch.arange(1, 5)], rtol=2e-5, atol=2e-5)
        check(op("max"), filled())
        for order in (0, 1, 2, 3.0, float("inf")):
            check(op("norm", "Scalar"), filled(), order)
        check(op("norm", "Scalar"), [torch.zeros(0)], 2)
        check(op("norm", "Scalar"), [torch.rand(1000).bfloat16()], 2, torch.float32, rtol=1e-3)
        if hasattr(aten, "_foreach_mm"):
            left, right = [torch.rand(2, 3), torch.rand(1, 4)], [torch.rand(3, 2), torch.rand(4, 4)]
            check(op("mm"), left, right, rtol=2e-5, atol=2e-5)


def test_binary():
    mixed = [torch.arange(3), torch.rand(2), torch.rand(2).bfloat16()]
    with together(**PRECISE) as check:
        for name in BINARY:
            check(op(name, "Scalar"), tensors()[1::2], 2.5)
            check(op(name, "ScalarList"), tensors()[1::2], [0.5, 3.0])
            check(op(name, "List"), tensors(), tensors(1))
        for name in ("add", "mul", "div", "sub"):  # a float number makes integers float
            check(op(name, "Scalar"), [torch.arange(4)], 0.5)
            check(op(name, "Scalar"), [torch.arange(4)], 2)
        for name in ("add", "sub"):
            check(op(name, "List"), tensors(), tensors(1), alpha=0.25)
        for name in ("add", "mul", "div"):
            check(op(name, "Tensor"), tensors(), torch.tensor(0.75))
            check(op(name, "Tensor"), [torch.rand(3)], torch.tensor(3))
        right = [torch.rand(3), torch.tensor(2), torch.rand(2)]
        check(op("mul", "List"), mixed, right)  # each item by its own dtypes
        check(op("pow", "ScalarAndTensor"), 0.9, tensors())


def test_ternary():
    lists = tensors(), tensors(1), tensors(2)
    numbers = [0.1, -0.2, 0.3, 0.4]
    with together(**PRECISE) as check:
        for name in ("addcmul", "addcdiv"):
            check(op(name, "Scalar"), *lists)
            check(op(name, "Scalar"), *lists, -0.1)
            check(op(name, "ScalarList"), *lists, numbers)
            check(op(name, "Tensor"), *lists, torch.tensor(numbers))
        for weight in (0.1, 0.5, 0.9, 1.0):
            check(op("lerp", "Scalar"), *lists[:2], weight)
        check(op("lerp", "ScalarList"), *lists[:2], [0.1, 0.5, 0.9, 1.0])
        check(op("lerp", "List"), *lists)


def test_numbers_as_inputs_of_the_program_give_what_constants_give():
    with together(lifted=True, **PRECISE) as check:
        check(op("mul", "Scalar"), tensors(), 0.999)
        check(op("add", "ScalarList"), tensors(), [0.1, 0.2, 0.3, 0.4])
        check(op("lerp", "Scalar"), tensors(), tensors(1), 0.7)
        check(op("addcdiv", "ScalarList"), tensors(), tensors(1), tensors(2), [0.1, 0.2, 0.3, 0.4])
        check(op("pow", "Scalar"), tensors(), 0.5)
    assert registry.find(op("addcdiv", "ScalarList")).lift


@pytest.mark.parametrize("name", ["addcmul", "addcdiv", "addcmul_", "addcdiv_"])
def test_numbers_of_a_cpu_tensor(name):
    results = []
    for device in ("cpu", "jax"):
        results.append([])
        for dtype in (torch.float32, torch.float64, torch.int64):
            lists = [[x.to(device) for x in tensors(seed)] for seed in range(3)]
            numbers = torch.tensor([3, -2, 1, 4]).to(dtype)
            made = getattr(torch, f"_foreach_{name}")(*lists, numbers)
            results[-1] += lists[0] if made is None else made
    for got, want in zip(results[1], results[0], strict=True):
        rtol = 1e-2 if want.itemsize == 2 else 1e-6
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=0)


def test_numbers_of_a_cpu_tensor_are_inputs_of_a_compiled_step():
    numbers = torch.zeros(1)
    step = xs.compile(lambda x: torch._foreach_addcmul([x], [x], [x], numbers)[0])
    x = torch.ones(2, device="jax")
    for number in range(4):
        assert step(x).tolist() == [1.0 + number] * 2
        numbers += 1


def test_numbers_of_a_cpu_tensor_that_do_not_fit():
    for numbers in ([2.0], [[1.0, 2.0]], 3.0):
        messages = []
        for device in ("cpu", "jax"):
            lists = [[torch.ones(2, device=device)] * 2] * 3
            with pytest.raises(RuntimeError, match="Expected") as error:
                torch._foreach_addcmul(*lists, torch.tensor(numbers))
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_copies_and_single_roundings():
    sources = [torch.arange(3), torch.ones(2)]
    got = evaluate(op("copy"), [torch.zeros(2, 3), torch.zeros(2)], sources)
    np.testing.assert_array_equal(got[0], [[0, 1, 2]] * 2)
    assert got[0].dtype == np.float32
    # 0.999 is 1 in bfloat16; torch multiplies in float32 and rounds once.
    start = torch.full((1,), 3.0).bfloat16()
    (got,) = evaluate(op("mul", "Scalar"), [start], 0.99)
    assert float(got[0]) == float(torch._foreach_mul([start], 0.99)[0])
    x = torch.tensor([float("nan"), -0.0, -2.0, 3.0])
    assert torch._foreach_sign([x.to("jax")])[0].tolist() == torch._foreach_sign([x])[0].tolist()


def test_long_lists_of_several_kinds_and_lists_that_do_not_fit():
    kinds = ((2, 3), (3,)), ((4,), (4,)), ((2, 3), (3,))
    mine, others = ([torch.ones(k[n]) for k in kinds * 20] for n in (0, 1))
    mine[1::3] = [x.long() for x in mine[1::3]]
    want = torch._foreach_add(mine, others, alpha=2)
    there = [[x.to("jax") for x in one] for one in (mine, others)]
    got = torch._foreach_add(*there, alpha=2)
    assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]
    whole = [torch.ones(2, dtype=torch.int64, device="jax")] * 4
    made = torch._foreach_mul(whole, [2, 2.0, True, 0.5])
    floats = torch.float32
    assert [x.dtype for x in made] == [torch.int64, floats, torch.int64, floats]
    two, three = [torch.ones(2, device="jax")] * 2, torch.ones(3, device="jax")
    with pytest.raises(RuntimeError, match="got 2 and 3"):
        torch._foreach_add(two, [*two, three])
    with pytest.raises(RuntimeError, match=r"size of tensor|broadcast a dimension of length 3"):
        torch._foreach_add(two, [two[0], three])[1].cpu()
