"""What torch refuses is refused at the call, with torch's error, and harms no other tensor."""

import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401
from isoshard.core.runtime.private_names import release

F = torch.nn.functional


def ones(*size, **options):
    return torch.ones(*size, device="jax", **options)


def long(*numbers):
    return torch.tensor(numbers, device="jax")


def mask(*numbers):
    return torch.tensor(numbers, dtype=torch.bool, device="jax")


CALLS = {
    "in place, grown: pow": lambda: ones(1).pow_(ones(2, 3)),
    **{
        f"in place, grown: {name}": lambda name=name: getattr(ones(1), name)(ones(2, 3))
        for name in (
            *("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "atan2_", "fmod_", "remainder_"),
            *("hypot_", "nextafter_", "copysign_", "heaviside_", "add_", "mul_", "copy_"),
        )
    },
    "in place, grown: shift": lambda: long(1).bitwise_left_shift_(long(1, 2)),
    "in place, grown: a list": lambda: torch._foreach_add_([ones(1)], [ones(2)]),
    "in place, grown: lerp": lambda: ones(3).lerp_(ones(2, 3), 0.5),
    "values that do not fit": lambda: ones(3).__setitem__(long(0, 1), ones(5)),
    "values with an axis more": lambda: ones(2, 3).index_put_([mask(1, 0)], ones(5, 1, 3)),
    "values behind a mask": lambda: ones(2, 3).__setitem__(mask(1, 0), ones(2, 4)),
    "accumulated into a number": lambda: ones(()).index_put([], ones(1), True),
    "a mask of another size": lambda: ones(3).__setitem__(mask(1, 0), 1.0),
    "too many indices": lambda: ones(3)[long(0), long(0)],
    "indices that do not go together": lambda: ones(3, 3)[long(0, 1), long(0, 1, 2)],
    "floats as indices": lambda: ones(3)[ones(2)],
    "an axis of size 0": lambda: ones(0, 3)[long(1, 2)],
    "an axis of size 0, written": lambda: ones(0, 3).__setitem__(long(1, 2), 1.0),
    "gather of nothing": lambda: ones(0, 3).gather(0, long(1)[None]),
    "index_select of nothing": lambda: ones(0, 3).index_select(0, long(1)),
    "take of nothing": lambda: ones(0, 3).take(long(1)),
    "scatter into nothing": lambda: ones(0, 3).scatter(0, long(1)[None], ones(1, 1)),
    "index_add of a row": lambda: ones(3, 2).index_add(0, long(0, 1), ones(2)),
    "index_reduce of a row": lambda: ones(3, 2).index_reduce(0, long(0, 1), ones(2, 1), "prod"),
    "masked_scatter of bytes": lambda: ones(2).masked_scatter(ones(2).byte(), ones(2)),
    "out= of another dtype: argmax": lambda: torch.argmax(ones(3), out=ones(()).byte()),
    "out= of another dtype: mm": lambda: torch.mm(ones(2, 2), ones(2, 2), out=ones(2, 2).half()),
    "out= of another dtype: topk": lambda: torch.topk(ones(3), 2, out=(ones(2), ones(2))),
    "out= of another dtype: nonzero": lambda: torch.nonzero(ones(3), out=ones(3, 1).byte()),
    "out= of another kind": lambda: torch.add(ones(3), 1, out=ones(3).int()),
    "complex numbers along no axis": lambda: ones(8, 8, dtype=torch.complex64).amax((0, 3)),
    "complex numbers along an axis": lambda: ones(8, 8, dtype=torch.complex64).amax(0),
    "a spread of nothing": lambda: ones(3).log_normal_(0.0, 0.0),
    "an axis twice, before one out of range": lambda: ones(3, 2, 2).std((-2, 1, 4)),
    "an axis out of range, before one twice": lambda: ones(3, 2, 2).nansum((4, -2, 1)),
    "a half of an element": lambda: ones(8, dtype=torch.bfloat16)[1:5].view(torch.float32),
    "negative strides": lambda: torch.as_strided(ones(3, 3), (2, 2), (2, -1)),
    "negative strides of new memory": lambda: torch.empty_strided((2,), (-1,), device="jax"),
    "a negative offset": lambda: torch.as_strided(ones(3, 3), (2, 2), (2, 1), -1),
    "clamp without bounds": lambda: ones(3).clamp(),
    "a float alpha": lambda: long(1, 2).add(1, alpha=1.5),
    "weights of classes": lambda: F.nll_loss(ones(3, 4), long(0, 0, 0), weight=ones(2)),
    "addcdiv of integers": lambda: long(1).addcdiv(long(1), long(1)),
    "embedding in a vector": lambda: F.embedding(long(0), ones(3)),
    "buckets in a matrix": lambda: torch.bucketize(ones(3), ones(2, 2)),
    "bins": lambda: torch.histogramdd(ones(3, 2), [3, 3, 3]),
    "cat of a number": lambda: torch.cat([ones(2), ones(())]),
    "amax of nothing": lambda: torch.amax(ones(2, 0), (0, 1)),
    "multilabel targets": lambda: F.multilabel_margin_loss(ones(5, 4), ones(4).long()),
    "a step of 0": lambda: torch.arange(0, 2, 0, device="jax"),
    "steps out of memory": lambda: torch.as_strided_scatter(ones(4), ones(2), (2,), (3,), 2),
    "exponential of integers": lambda: long(1).exponential_(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_refused_as_on_the_cpu(name, monkeypatch):
    call = CALLS[name]
    with monkeypatch.context() as on_cpu:
        for maker in ("ones", "tensor", "arange", "empty_strided"):
            made = getattr(torch, maker)
            on_cpu.setattr(
                torch, maker, lambda *a, made=made, **k: made(*a, **{**k, "device": "cpu"})
            )
        with pytest.raises(Exception) as want:
            call()
    beside = torch.arange(4.0, device="jax") * 2
    with pytest.raises(want.type):
        call()
    assert beside.tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bounds", [(0, 2, 0.5), (5, 0, -0.5), (0.9, 4, 0.99)])
def test_integers_in_steps_of_less_than_one(bounds, dtype):
    """torch 2.15 repeats the first; 2.13 refuses 64 bits, and 2.11 divides by zero."""
    if release(torch.__version__) >= (2, 15):
        made = torch.arange(*bounds, dtype=dtype, device="jax")
        assert torch.equal(made.cpu(), torch.arange(*bounds, dtype=dtype))
    else:
        with pytest.raises((ValueError, RuntimeError), match="step must be nonzero"):
            torch.arange(*bounds, dtype=dtype, device="jax")


def test_what_grows_is_named():
    with pytest.raises(RuntimeError, match=r"output with shape \[1\] doesn't .* shape \[2, 3\]"):
        ones(1).pow_(ones(2, 3))


def test_errors_of_shape_functions_are_sentences():
    with pytest.raises(
        RuntimeError, match=r"^Integer division with addcdiv is no longer supported"
    ):
        long(1).addcdiv(long(1), long(1))
