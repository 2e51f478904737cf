"""torch_xla's GRU: what is one loop, what is left to `torch.nn.GRU`, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from isoshard.torch_bridge.torch_xla.experimental.gru import GRU


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def both(*args, **kwargs):
    """torch's module, and ours on the device with its numbers."""
    torch.manual_seed(0)
    theirs, ours = torch.nn.GRU(*args, **kwargs), GRU(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours.to("jax")


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (5, 2, 3)),
        ({"batch_first": True, "bias": False}, (2, 5, 3)),
        ({"num_layers": 2}, (5, 3)),
        ({"bidirectional": True}, (2, 2, 3)),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_torchs(options, shape):
    theirs, ours = both(3, 4, **options)
    x = draw(*shape).requires_grad_()
    y = x.detach().to("jax").requires_grad_()
    want, got = theirs(x), ours(y)
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=1e-4, atol=1e-5)
    want[0].square().sum().backward()
    got[0].square().sum().backward()
    torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-4, atol=1e-5)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=1e-4, atol=1e-5)


def test_dropout_is_between_layers_while_training():
    theirs, ours = both(3, 4, num_layers=2, dropout=0.5)
    x = draw(5, 2, 3)
    ours.eval()
    want = theirs.eval()(x)[0]
    torch.testing.assert_close(ours(x.to("jax"))[0].cpu(), want, rtol=1e-4, atol=1e-5)
    ours.train()
    assert not torch.equal(ours(x.to("jax"))[0].cpu(), ours(x.to("jax"))[0].cpu())


def test_the_cpu_and_packed_sequences_are_torchs():
    theirs, _ = both(3, 4)
    on_cpu = GRU(3, 4)
    on_cpu.load_state_dict(theirs.state_dict())
    x = draw(5, 2, 3)
    assert torch.equal(on_cpu(x)[0], theirs(x)[0])
    packed = pack_sequence([x[:, 0], x[:3, 1]])
    assert torch.equal(on_cpu(packed)[0].data, theirs(packed)[0].data)


def test_weights_by_layer():
    _, ours = both(3, 4, num_layers=2)
    assert [list(w.shape) for w in ours.weight_ih] == [[12, 3], [12, 4]]
    assert ours.bias_hh[1] is ours.bias_hh_l1
    assert GRU(3, 4, bias=False).bias_ih == []


@pytest.mark.parametrize(
    ("x", "hx", "message"),
    [
        ((5, 2, 7), None, "Expected 3, got 7"),
        ((5, 2, 3), (2, 2, 4), "Expected hidden size"),
        ((5, 3), (1, 1, 4), "as many axes as the input, 2"),
    ],
)
def test_shapes_that_do_not_fit(x, hx, message):
    gru = GRU(3, 4).to("jax")
    with pytest.raises(RuntimeError, match=message):
        gru(draw(*x).to("jax"), None if hx is None else draw(*hx).to("jax"))
    with pytest.raises(ValueError, match="2 or 3 axes"):
        gru(draw(1, 2, 3, 3).to("jax"))
