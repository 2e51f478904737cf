"""Tensors on the `jax` device do what users of torch and of NumPy do with tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.on_both import on_both, raises_on_both
from tests.torch_bridge.training.test_training import close, draw

Case = Callable[[torch.Tensor], Any]
pytestmark = pytest.mark.filterwarnings("ignore::isoshard.core.errors.RecompilationWarning")

# --- Indexing ------------------------------------------------------------------------------------


INDEXING: dict[str, Case] = {
    "negative": lambda x: [x[-1], x[:, -2], x[-2:], x[..., -1]],
    "ellipsis and new axes": lambda x: [x[..., None], x[None, ..., 0], x[:, None, 1:]],
    "steps": lambda x: [x[::2], x[1:, ::3]],
    "integers": lambda x: [x[[0, 2]], x[[0, 1], [1, 2]], x[torch.tensor([[0], [2]]), [0, 1]]],
    "arrays": lambda x: [x[np.array([2, 0])], x[:, np.array([1, 1])], x[np.int64(1)]],
    "masks": lambda x: [
        x[x > 0],
        x[torch.tensor([True, False, True])],
        x[:, np.array([1, 0, 1, 0], bool)],
    ],
    "tensors of zero dimensions": lambda x: [
        x[torch.tensor(1)],
        x[torch.tensor(1).to(x.device), 2],
    ],
    "bool and None": lambda x: [x[True], x[None], x[False].shape],
    "mixed": lambda x: [x[1:, [0, 1]], x[[0, 1], None, 2], x[..., [3, 0]]],
}


def test_indexing():
    on_both(lambda x: {name: index(x) for name, index in INDEXING.items()}, grad=False)


def test_assignment_by_index():
    def program(x: torch.Tensor) -> Any:
        x[0] = 1
        x[:, -1] = torch.arange(3.0).to(x.device)
        x[x < -0.5] = 0.25
        x[[1, 2], [0, 1]] = x.new_tensor([7.0, 8.0])
        x[..., 1:3] *= 2
        x[1, 2] = torch.tensor(5.0)
        x[np.array([0, 2])] += 1
        return x

    on_both(program, grad=False)
    raises_on_both(lambda x: x[3], match=r"index 3 is out of bounds", grad=False)
    raises_on_both(lambda x: x[0, 0, 0], match=r"too many indices", grad=False)
    raises_on_both(lambda x: x[:, ::-1], match=r"step must be greater than zero", grad=False)
    raises_on_both(lambda x: x["a"], match=r"indices|index|'str'", grad=False)


# --- Python's own protocols ----------------------------------------------------------------------


def test_protocols_of_python():
    def program(x: torch.Tensor) -> Any:
        first = x[0, 0].item()
        chain = 0 < x.abs()[0, 0] < 10
        return [
            len(x), [row.sum() for row in x], first in x, 1e9 in x, bool(chain),
            bool(x[0, 0] == first), float(x[0, 0]) == first, int(x[0, 0] * 0),
            complex(x[0, 0]) == first, [1, 2, 3][x.int()[0, 0] * 0],
            x.tolist() == [row.tolist() for row in x], hash(x) == hash(x),
            x.shape[0] + x.size(1) + x.numel() + x.ndim + x.nelement(), dict(enumerate(x.shape)),
            next(iter(reversed(x))), max(x[0], key=float), sum(x.unbind()),
            list(zip(x[0].tolist(), range(2), strict=False)), x.element_size(), x.nbytes,
        ]  # fmt: skip

    on_both(program, grad=False)
    raises_on_both(lambda x: bool(x), match=r"more than one value is ambiguous", grad=False)
    raises_on_both(lambda x: float(x), match=r"(only one element|converted to Scalar)", grad=False)
    raises_on_both(lambda x: len(x[0, 0]), match=r"0-d tensor", grad=False)
    raises_on_both(lambda x: [*x[0, 0]], match=r"0-d tensor", grad=False)
    raises_on_both(lambda x: range(x[0, 0] * 1.0), match=r"integer", grad=False)


def test_formatting():
    for value, spec in ((1.23456, ".3f"), (12, "05d"), (2.5e-8, "e")):
        t = torch.tensor(value)
        assert f"{t.to('jax'):{spec}}" == f"{t:{spec}}"
    assert f"{torch.ones(2, device='jax')}" == str(torch.ones(2, device="jax"))
    assert "%.2f" % torch.tensor(1.5, device="jax") == "1.50"  # noqa: UP031


PRINTED = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e5m2),
]


def test_printing_every_dtype():
    for dtype in PRINTED:
        for data in (torch.arange(6).reshape(2, 3), torch.tensor(3), torch.zeros(0, 2)):
            data = data.to(dtype)
            assert repr(data.to("jax")) == f"{repr(data)[:-1]}, device='jax:0')"


def test_printing_large_tensors_and_print_options(mesh):
    big = torch.arange(10_000.0).reshape(100, 100)
    text = repr(iso.shard(big[:96, :96].contiguous(), mesh, P("x", "y")))
    assert "..." in text and "sharding=P" in text
    old = copy.copy(torch._tensor_str.PRINT_OPTS)
    try:
        torch.set_printoptions(precision=1, sci_mode=False, threshold=4, edgeitems=1)
        data = torch.tensor([1.2345, 2.0, 3.0, 4.0, 5.0, 6.0])
        assert repr(data.to("jax")) == f"{repr(data)[:-1]}, device='jax:0')"
    finally:
        torch._tensor_str.PRINT_OPTS.__dict__.update(old.__dict__)
    for data in (torch.tensor([float("nan"), float("inf"), -0.0]), torch.tensor([1e10, 1e-10])):
        assert repr(data.to("jax")) == f"{repr(data)[:-1]}, device='jax:0')"
    ones = torch.ones(8, device="jax")
    split = iso.shard(ones, mesh, P("x")) + 1
    assert repr(ones[:2] * 3) == "tensor([3., 3.], device='jax:0')"  # of the same program
    assert repr(split).endswith("sharding=P('x',))")
    whole = iso.shard(torch.ones(2, device="jax"), mesh, P())
    assert repr(whole) == "tensor([1., 1.], device='jax:0', sharding=P())"
    assert "grad_fn=<MulBackward0>" in repr(torch.ones(2, device="jax").requires_grad_() * 2)
    assert repr(torch.nn.Parameter(torch.ones(1, device="jax"))).startswith("Parameter containing:")


# --- NumPy ---------------------------------------------------------------------------------------


def test_numpy_takes_tensors():
    x = draw(3, 4).to("jax")
    want = draw(3, 4).numpy()
    for got, wanted in (
        (np.asarray(x), want),
        (np.array(x, dtype=np.float64), want.astype(np.float64)),
        (np.sum(x.numpy()), want.sum()),
        (np.sin(x), np.sin(want)),
        (np.stack([x[0], x[1]]), want[:2]),
        (np.concatenate([x, x]), np.concatenate([want, want])),
        (np.add(x.numpy(), 1), want + 1),
        (np.maximum(want, x), want),
        (np.allclose(x, want), True),
        (np.asarray(x.bool()), want.astype(bool)),
        (torch.from_numpy(want).to("jax").numpy(), want),
        (torch.as_tensor(want, device="jax").numpy(), want),
        (torch.tensor(want, device="jax").numpy(), want),
        (x.detach().numpy(force=True), want),
    ):
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6)
    np.testing.assert_array_equal(np.arange(4)[torch.tensor([1, 3]).to("jax").numpy()], [1, 3])
    assert torch.tensor([x[0, 0].item(), 1.0], device="jax").shape == (2,)
    values = x.numpy()
    values[0] = 9
    close(x, draw(3, 4))


def test_numpys_functions_of_tensors():
    x = draw(3, 4).to("jax")
    got = np.exp(x)
    assert isinstance(got, xs.XLAShardedTensor)
    close(got, draw(3, 4).exp())
    close(np.multiply(x, x) + x, draw(3, 4) ** 2 + draw(3, 4))
    raises_on_both(lambda x: np.sum(x), match=r"sum\(\)", grad=False)  # torch takes no out=None
    assert np.sum(np.asarray(x)) == pytest.approx(x.sum().item(), rel=1e-5)


# --- What a tensor says of itself ----------------------------------------------------------------


def test_questions():
    methods = (
        "is_contiguous", "stride", "storage_offset", "dim", "is_floating_point", "is_complex",
        "is_signed", "is_conj", "is_neg",
    )  # fmt: skip
    fields = (
        "is_sparse", "is_quantized", "is_leaf", "is_cuda", "is_meta", "is_nested", "dtype",
        "itemsize", "layout",
    )  # fmt: skip

    def program(x: torch.Tensor) -> Any:
        views = [x, x.t(), x[1:, ::2], x[:, None], x[0], x.expand(2, 3, 4), x.reshape(2, 6).T]
        found = [[getattr(v, name)() for name in methods] for v in views]
        found += [[getattr(v, name) for name in fields] for v in views]
        return found, [(v.stride(0), tuple(v.size()), v.is_same_size(x)) for v in views]

    on_both(program, grad=False)
    x = torch.ones(2, device="jax")
    assert x.get_device() == x.device.index == 0
    assert x.device.type == "jax" and not x.is_cpu and torch.is_tensor(x)
    assert isinstance(x, torch.Tensor) and not x.is_cuda and not x.is_mps
    assert "FloatTensor" in x.type()
