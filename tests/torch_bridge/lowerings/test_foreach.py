"""List operators against CPU torch: mixed dtypes and shapes in one list, every overload."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.signatures import shape_inference
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot
from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import check, evaluate, to_array
from tests.torch_bridge.older_torch import has

aten = torch.ops.aten
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow")
UNARY = sorted(
    name.removeprefix("_foreach_")
    for name in (full.removeprefix("aten::") for full in registry.names())
    if name.startswith("_foreach_") and "." not in name and hasattr(aten, name)
)


def op(name: str, overload: str = "default"):
    return getattr(getattr(aten, f"_foreach_{name}"), overload)


def tensors(seed: int = 0) -> list[torch.Tensor]:
    """Values in (0.5, 1), where every function and power is defined."""
    torch.manual_seed(seed)
    return [
        torch.rand(3, 4) / 2 + 0.5,
        torch.rand(()) / 2 + 0.5,
        torch.rand(0, 2),
        (torch.rand(5) / 2 + 0.5).bfloat16(),
    ]


def precise(*args, **kwargs):
    """bfloat16 results may differ in the last of their 8 bits."""
    check(*args, rtol=1e-2, atol=1e-2, **kwargs)


@pytest.mark.parametrize("name", [n for n in UNARY if n not in ("copy", "max", "mm")])
def test_unary(name):
    precise(op(name), tensors())


@pytest.mark.parametrize("name", ["exp", "sqrt", "neg", "abs"])
def test_unary_of_integers(name):
    check(op(name), [torch.arange(1, 5)])


def test_max_of_each():
    precise(op("max"), [x for x in tensors() if x.numel()])


@pytest.mark.parametrize("name", BINARY)
def test_number(name):
    precise(op(name, "Scalar"), tensors(), 2.5)
    precise(op(name, "Scalar"), tensors(), 2)


@pytest.mark.parametrize("name", ["add", "mul", "div", "sub"])
def test_float_number_makes_integers_float(name):
    check(op(name, "Scalar"), [torch.arange(4)], 0.5)
    check(op(name, "Scalar"), [torch.arange(4)], 2)


@pytest.mark.parametrize("name", BINARY)
def test_numbers(name):
    precise(op(name, "ScalarList"), tensors(), [0.5, 2.0, 1.0, 3.0])


@pytest.mark.parametrize("name", BINARY)
def test_lists(name):
    precise(op(name, "List"), tensors(), tensors(1))


@pytest.mark.parametrize("name", ["add", "sub"])
def test_lists_with_factor(name):
    precise(op(name, "List"), tensors(), tensors(1), alpha=0.25)


@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_one_tensor_for_all(name):
    precise(op(name, "Tensor"), tensors(), torch.tensor(0.75))
    check(op(name, "Tensor"), [torch.rand(3)], torch.tensor(3))


def test_dtypes_promote_element_by_element():
    left = [torch.arange(3), torch.rand(2), torch.rand(2).bfloat16()]
    right = [torch.rand(3), torch.tensor(2), torch.rand(2)]
    precise(op("mul", "List"), left, right)


def test_number_to_powers():
    precise(op("pow", "ScalarAndTensor"), 0.9, tensors())


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_ternary(name):
    lists = tensors(), tensors(1), tensors(2)
    precise(op(name, "Scalar"), *lists)
    precise(op(name, "Scalar"), *lists, -0.1)
    precise(op(name, "ScalarList"), *lists, [0.1, -0.2, 0.3, 0.4])
    precise(op(name, "Tensor"), *lists, torch.tensor([0.1, -0.2, 0.3, 0.4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("name", ["addcmul", "addcdiv", "addcmul_", "addcdiv_"])
def test_numbers_of_a_cpu_tensor(name, dtype):
    numbers, results = torch.tensor([3, -2, 1, 4]).to(dtype), []
    for device in ("cpu", "jax"):
        lists = [[x.to(device) for x in tensors(seed)] for seed in range(3)]
        made = getattr(torch, f"_foreach_{name}")(*lists, numbers)
        results.append(lists[0] if made is None else made)
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


@pytest.mark.parametrize("numbers", [[2.0], [[1.0, 2.0]], 3.0])
def test_numbers_of_a_cpu_tensor_that_do_not_fit(numbers):
    messages = []
    for device in ("cpu", "jax"):
        lists = [[torch.ones(2, device=device)] * 2] * 3
        with pytest.raises(RuntimeError, match="Expected") as error:
            torch._foreach_addcmul(*lists, torch.tensor(numbers))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9, 1.0])
def test_lerp(weight):
    precise(op("lerp", "Scalar"), tensors(), tensors(1), weight)
    precise(op("lerp", "ScalarList"), tensors(), tensors(1), [weight] * 4)


def test_lerp_by_tensors():
    precise(op("lerp", "List"), tensors(), tensors(1), tensors(2))


@pytest.mark.parametrize("ord", [0, 1, 2, 3.0, float("inf")])
def test_norm(ord):
    precise(op("norm", "Scalar"), [x for x in tensors() if x.numel()], ord)


def test_norm_of_empty_is_zero():
    check(op("norm", "Scalar"), [torch.zeros(0)], 2)


def test_norm_in_wider_dtype():
    check(op("norm", "Scalar"), [torch.rand(1000).bfloat16()], 2, torch.float32, rtol=1e-3)


def test_copy_casts_and_broadcasts():
    got = evaluate(
        op("copy"), [torch.zeros(2, 3), torch.zeros(2)], [torch.arange(3), torch.ones(2)]
    )
    np.testing.assert_array_equal(got[0], [[0, 1, 2]] * 2)
    assert got[0].dtype == np.float32


@has("_foreach_mm")
def test_matrix_products():
    check(op("mm"), [torch.rand(2, 3), torch.rand(1, 4)], [torch.rand(3, 2), torch.rand(4, 4)])


@pytest.mark.parametrize(
    ("name", "overload", "arguments"),
    [
        ("mul", "Scalar", (0.999,)),
        ("add", "ScalarList", ([0.1, 0.2, 0.3, 0.4],)),
        ("lerp", "Scalar", (tensors(1), 0.7)),
        ("addcdiv", "ScalarList", (tensors(1), tensors(2), [0.1, 0.2, 0.3, 0.4])),
        ("pow", "Scalar", (0.5,)),
    ],
)
def test_lifted_numbers_give_what_constants_give(name, overload, arguments):
    lowering = registry.find(op(name, overload))
    arrays = [
        [to_array(x) if isinstance(x, torch.Tensor) else x for x in part]
        if isinstance(part, list)
        else part
        for part in (tensors(), *arguments)
    ]
    lifted = [
        [jnp.float32(x) if isinstance(x, float) else x for x in part]
        if isinstance(part, list)
        else jnp.float32(part)
        for part in arrays
    ]
    for got, want in zip(lowering.function(*lifted), lowering.function(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert lowering.lift


def test_bfloat16_average_decays():
    """0.999 is 1 in bfloat16; torch multiplies in float32 and rounds once."""
    start = torch.full((1,), 3.0).bfloat16()
    (got,) = evaluate(op("mul", "Scalar"), [start], 0.99)
    assert float(got[0]) == float(torch._foreach_mul([start], 0.99)[0])


def test_signs_of_nan_and_zero():
    x = torch.tensor([float("nan"), -0.0, -2.0, 3.0])
    got = torch._foreach_sign([x.to("jax")])[0].cpu()
    assert got.tolist() == torch._foreach_sign([x])[0].tolist()


def metas_of(*shapes_and_dtypes):
    return tuple(Meta.of(torch.empty(s, dtype=d, device="meta")) for s, d in shapes_and_dtypes)


def test_shapes_of_lists_are_asked_once_for_each_kind_of_item(monkeypatch):
    op = torch.ops.aten._foreach_add.List
    asked = []

    def counting(op):
        asked.append(op)
        return lambda *args, **kwargs: asked.append(len(args[0])) or op(*args, **kwargs)

    monkeypatch.setattr(shape_inference.registry, "shape_function", counting)
    mine = [((2, 3), torch.float32), ((4,), torch.int64), ((2, 3), torch.float32)] * 20
    others = [((3,), torch.float64), ((4,), torch.float32), ((3,), torch.float64)] * 20
    slots = [Slot(number) for number in range(120)]
    outs = infer(op, (slots[:60], slots[60:]), {"alpha": 2}, metas_of(*mine, *others))
    wanted = op(*[[m.tensor() for m in metas_of(*one)] for one in (mine, others)], alpha=2)
    assert outs == tuple(map(Meta.of, wanted)) and len(set(outs)) == 2
    assert [one for one in asked if isinstance(one, int)] == [2]


def test_numbers_beside_the_items_tell_them_apart():
    op = torch.ops.aten._foreach_mul.ScalarList
    metas = metas_of(*[((2,), torch.int64)] * 4)
    outs = infer(op, ([*map(Slot, range(4))], [2, 2.0, True, 3]), {}, metas)
    kinds = [torch.int64, torch.float32, torch.int64, torch.int64]
    assert [out.dtype for out in outs] == kinds
    lifted = infer(op, ([*map(Slot, range(4))], [Lift(0), 2, Lift(0), 2]), {}, metas, (0.5,))
    kinds = [torch.float32, torch.int64, torch.float32, torch.int64]
    assert [out.dtype for out in lifted] == kinds


def test_lists_of_different_lengths_are_refused_with_their_lengths():
    metas = metas_of(*[((2,), torch.float32)] * 5)
    with pytest.raises(RuntimeError, match="got 2 and 3"):
        infer(
            torch.ops.aten._foreach_add.List,
            ([Slot(0), Slot(1)], [Slot(2), Slot(3), Slot(4)]),
            {},
            metas,
        )


def test_an_item_that_does_not_fit_is_refused_wherever_it_stands():
    metas = metas_of(*[((2,), torch.float32)] * 5, ((3,), torch.float32))
    slots = [*map(Slot, range(6))]
    with pytest.raises(RuntimeError, match="broadcast a dimension of length 3"):
        infer(torch.ops.aten._foreach_add.List, (slots[:3], slots[3:]), {}, metas)
