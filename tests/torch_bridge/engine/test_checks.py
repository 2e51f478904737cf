"""What torch's kernels refuse is refused where it is said, with the same class of error."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import isoshard.torch_bridge as xs


def tensors(device):
    def zeros(*size, dtype=torch.float32):
        return torch.zeros(*size, dtype=dtype, device=device)

    return {
        "torch": torch,
        "F": functional,
        "floats": zeros(2),
        "ints": zeros(2, dtype=torch.int64),
        "bools": zeros(2, dtype=torch.bool),
        "bytes": zeros(2, dtype=torch.uint8),
        "complexes": zeros(2, dtype=torch.complex64),
        "empty": zeros(0, 2),
    }


REFUSED = (
    "ints.var()",
    "ints.std(0)",
    "torch.var_mean(ints)",
    "complexes.floor()",
    "complexes.ceil_()",
    "complexes.clamp(min=1)",
    "floats.clamp(1j)",
    "complexes.argmax()",
    "bools.argmin(0)",
    "empty.argmax()",
    "empty.argmax(0)",
    "empty.max()",
    "empty.min(0)",
    "empty.median(0)",
    "empty.nanmedian(0)",
    "empty.mode(0)",
    "floats.fill_(1j)",
    "torch.full_like(floats, 1j)",
    "floats.masked_fill(bools, 1j)",
    "floats.index_fill(0, ints[:1], 1j)",
    "floats.scatter_(0, ints, 1j)",
    "floats.scatter(0, ints, 1j, reduce='add')",
    "torch.constant_pad_nd(floats, (1, 1), 1j)",
    "torch.addmm(floats[:, None], floats[:, None], floats[:1, None], alpha=1j)",
    "torch.addmv(floats, floats[:, None], floats[:1], beta=1j)",
    "torch.addcmul(floats, floats, floats, value=1j)",
    "torch.addcdiv(floats, floats, floats, value=1j)",
    "floats.index_add(0, ints, floats, alpha=1j)",
    "torch.lerp(floats, floats, 1j)",
    "torch.hardshrink(floats, 1j)",
    "bytes.fill_(256)",
    "bytes.scatter(0, ints, -256)",
    "torch.full_like(bytes, 300)",
    "bytes.char().masked_fill(bools, 128)",
    "ints ** -1",
    "ints.pow_(-2)",
    "bools ** -1",
    "torch.mm(floats[None], ints[:, None])",
    "floats @ ints",
    "torch.baddbmm(floats[None, None], ints[None, None], ints[None, None].mT)",
    "floats - bools",
    "1 - bools",
    "floats.sub_(True)",
    "torch.sign(complexes)",
    "torch.maximum(complexes, complexes)",
    "torch.minimum(floats, complexes)",
    "torch.heaviside(floats, ints)",
    "floats.index_add(0, ints, ints)",
    "floats.index_put((ints,), ints)",
    "floats.index_put_((ints,), ints)",
    "complexes[0].min(-1)",
    "floats.norm(2, (-1, 0))",
    "floats.softmax(2)",
    "floats.log_softmax(-3)",
    "torch.signbit(complexes)",
    "ints.mul_(0.5)",
    "ints.mul_(floats)",
    "bools.add_(1)",
    "floats.mul_(1j)",
    "torch._foreach_add_([bools, floats], 1)",
    "torch._foreach_mul_([ints], 0.5)",
    "torch.sort(floats, dim=2, stable=True)",
    "F.relu(bools)",
    "F.relu(complexes)",
)

ALLOWED = (
    "empty.median()",
    "empty.argmax(1)",
    "torch.full((2,), 1j, device=floats.device)",
    "torch.addr(floats.outer(floats), floats, ints)",
    "complexes.index_add(0, ints, complexes)",
    "complexes.scatter(0, ints, 1j)",
    "bools.scatter(0, ints, 1j)",
    "floats.scatter(0, ints[:0], 1j)",
    "floats.scatter(0, ints, 2 + 0j)",
    "bytes.fill_(255)",
    "bytes.masked_fill(bools, -255)",
    "bools.pow_(True)",
    "floats ** -1",
    "bools.sum() - 1",
    "ints.copy_(floats)",
    "ints.eq_(floats)",
    "floats.mul_(ints)",
    "torch._foreach_mul_([floats], 2)[0]",
    "bools.masked_fill_(bools, 1)",
)


@pytest.mark.parametrize("call", REFUSED)
def test_refused_as_on_the_cpu(call):
    with pytest.raises((RuntimeError, IndexError, TypeError)) as on_cpu:
        eval(call, tensors("cpu"))
    with pytest.raises((RuntimeError, IndexError, TypeError)) as on_jax:
        eval(call, tensors("jax"))
    assert issubclass(on_jax.type, IndexError) == issubclass(on_cpu.type, IndexError)
    xs.sync()


@pytest.mark.parametrize("call", ALLOWED)
def test_allowed_as_on_the_cpu(call):
    want, got = eval(call, tensors("cpu")), eval(call, tensors("jax"))
    if want is not None:
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)


def test_the_message_names_what_was_given():
    with pytest.raises(RuntimeError, match=r"^std and var only support floating point and complex"):
        torch.ones(2, dtype=torch.int64, device="jax").var()
    with pytest.raises(RuntimeError, match=r"value 1j cannot be converted to type torch.float32"):
        torch.ones(2, device="jax").fill_(1j)


def test_a_refused_write_changes_nothing():
    x = torch.arange(3.0).to("jax")
    with pytest.raises(RuntimeError, match="bool tensor is not supported"):
        x[1:].sub_(True)
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "call",
    [
        "x + -1",
        "x > -1",
        "x * 300",
        "x & -1",
        "x // -2",
        "torch.where(x > 2, x, -1)",
    ],
)
def test_numbers_wrap_in_narrow_integers(call):
    want, got = (
        eval(call, {"torch": torch, "x": torch.tensor([1, 5, 255], dtype=torch.uint8).to(device)})
        for device in ("cpu", "jax")
    )
    assert torch.equal(got.cpu(), want)
