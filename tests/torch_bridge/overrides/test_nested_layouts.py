"""Nested tensors are refused at the call, in both layouts, with what to do instead."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401

ROWS = (torch.ones(2, 4), torch.ones(3, 4))
LAYOUTS = (torch.strided, torch.jagged)


def on_device():
    """The rows on the device."""
    return [row.to("jax") for row in ROWS]


CALLS = {
    "rows of the CPU": lambda n, **k: n.nested_tensor(list(ROWS), device="jax", **k),
    "numbers": lambda n, **k: n.nested_tensor([[1.0], [2.0, 3.0]], device="jax:0", **k),
    "rows": lambda n, **k: n.nested_tensor(on_device(), **k),
    "as, of the CPU": lambda n, **k: n.as_nested_tensor(list(ROWS), device="jax", **k),
    "as": lambda n, **k: n.as_nested_tensor(on_device(), **k),
    "as, of one": lambda n, **k: n.as_nested_tensor(torch.ones(2, 3, 4, device="jax"), **k),
    "to": lambda n, **k: n.nested_tensor(list(ROWS), **k).to("jax"),
    "to, a device": lambda n, **k: n.nested_tensor(list(ROWS), **k).to(torch.device("jax")),
    "to, by name": lambda n, **k: n.nested_tensor(list(ROWS), **k).to(device="jax"),
    "to, a dtype too": lambda n, **k: n.nested_tensor(list(ROWS), **k).to("jax", torch.float64),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(layout):
    """The message names the call, padding and masks."""
    message = r"no nested tensors; pad .*pad_sequence.*mask"
    for call in CALLS.values():
        with pytest.raises(NotImplementedError, match=message):
            call(torch.nested, layout=layout)


def test_views_and_masks_are_refused():
    """The other ways to a nested tensor."""
    values, mask = torch.ones(5, 4, device="jax"), torch.ones(5, 4, device="jax") > 0
    with pytest.raises(NotImplementedError, match=r"nested_tensor_from_jagged: .* no nested"):
        torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5], device="jax"))
    with pytest.raises(NotImplementedError, match=r"masked_select: .* no nested"):
        torch.nested.masked_select(values, mask)
    with pytest.raises(NotImplementedError, match=r"from_mask: .* no nested"):
        torch._nested_tensor_from_mask(
            torch.ones(2, 3, 4, device="jax"), torch.ones(2, 3).to("jax")
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_cpu_stay():
    """Torch's own are as they were, and moving them about on the CPU too."""
    for layout in LAYOUTS:
        nested = torch.nested.nested_tensor(list(ROWS), layout=layout).to(torch.float64)
        assert nested.to("cpu").dtype == torch.float64
        padded = nested.to_padded_tensor(0.0).to("jax")
        assert padded.sum().item() == 20


def test_an_encoder_keeps_its_padding():
    """Torch's encoder turns padded input into a nested tensor for inference, elsewhere."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False] * 3])
    with torch.no_grad():
        expected = encoder.double()(x.double(), src_key_padding_mask=padding).float()
        encoder.float().to("jax")
        got = encoder(x.to("jax"), src_key_padding_mask=padding.to("jax")).cpu()
    torch.testing.assert_close(got[~padding], expected[~padding], rtol=1e-4, atol=1e-5)
