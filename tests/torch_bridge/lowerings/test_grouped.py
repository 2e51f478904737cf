"""Grouped matrix products, all four shapes, and their gradients, against CPU torch."""

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

# Ends of three groups of 12; the second one is empty.
ENDS = (4, 4, 12)
SHAPES = {
    "rows": ((12, 8), (3, 8, 16)),
    "columns": ((3, 8, 16), (16, 12)),
    "inner": ((8, 12), (12, 16)),
    "batched": ((3, 8, 16), (3, 16, 4)),
}


def _run(device: str, shapes, *, ragged: bool) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    one, two = (torch.randn(shape, generator=source).to(device) for shape in shapes)
    one.requires_grad_()
    two.requires_grad_()
    offs = torch.tensor(ENDS, dtype=torch.int32, device=device) if ragged else None
    result = grouped_mm(one, two, offs=offs)
    weights = torch.randn(result.shape, generator=source).to(device)
    torch.autograd.backward(result, weights)
    return [tensor.detach().cpu() for tensor in (result, one.grad, two.grad)]


@pytest.mark.parametrize("kind", SHAPES)
def test_it_is_cpu_torch(kind):
    ragged = kind != "batched"
    got, want = (_run(device, SHAPES[kind], ragged=ragged) for device in ("jax", "cpu"))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rows_behind_the_last_end_are_zero():
    rows, experts = torch.ones(12, 8, device="jax"), torch.ones(3, 8, 16, device="jax")
    ends = torch.tensor([2, 4, 8], dtype=torch.int32, device="jax")
    result = grouped_mm(rows, experts, offs=ends).cpu()
    assert (result[:8] == 8).all()
    assert (result[8:] == 0).all()


def test_a_bias_is_refused():
    rows, experts = torch.ones(4, 8, device="jax"), torch.ones(1, 8, 16, device="jax")
    ends = torch.tensor([4], dtype=torch.int32, device="jax")
    bias = torch.ones(1, 16, device="jax")
    result = torch.ops.aten._grouped_mm.default(rows, experts, ends, bias)
    with pytest.raises(NotImplementedError, match="bias has no lowering; add the bias of each row"):
        result.cpu()
