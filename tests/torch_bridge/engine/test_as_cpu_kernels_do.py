"""Where torch's CPU kernels and its shape functions disagree, the device does as the kernels."""

import warnings

import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401

F = torch.nn.functional
LAST = torch.channels_last


def images(device, *shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    return x.to(memory_format=LAST if len(shape) == 4 else torch.channels_last_3d)


def padded(device, mode, *shape):
    x = images(device, *shape).requires_grad_()
    out = F.pad(x, (1,) * 2 * (len(shape) - 2), mode=mode)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return out, grad


def unpooled(device):
    return F.max_unpool2d(*F.max_pool2d(images(device, 2, 3, 4, 6), 2, return_indices=True), 2)


def one_row(device):
    x = images("cpu", 1, 5, 1, 1).reshape(5).to(device).requires_grad_()
    loss = F.multi_margin_loss(x, torch.tensor(2, device=device), reduction="none")
    (grad,) = torch.autograd.grad(loss, x)
    return loss, grad


CALLS = {
    "reflect": lambda device: padded(device, "reflect", 2, 3, 4, 5),
    "replicate": lambda device: padded(device, "replicate", 1, 3, 4, 5),
    "a volume": lambda device: padded(device, "reflect", 2, 3, 4, 5, 6),
    "unpool": lambda device: [unpooled(device)],
    "one row": one_row,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_shapes_strides_and_numbers(call):
    for have, wish in zip(call("jax"), call("cpu"), strict=True):
        assert (have.shape, have.stride()) == (wish.shape, wish.stride())
        torch.testing.assert_close(have.detach().cpu(), wish.detach())


def conv(n, **options):
    return lambda device: getattr(F, f"conv{n}d")(
        torch.ones(1, 1, *[4] * n, device=device),
        torch.ones(1, 1, *[2] * n, device=device),
        **options,
    )


def lowest_and_highest(device):
    out = (torch.ones((), device=device), torch.ones((), dtype=torch.float64, device=device))
    return torch.aminmax(torch.ones(3, device=device), out=out)


def is_in(*elements):
    def call(device):
        args = [one.to(device) if isinstance(one, torch.Tensor) else one for one in elements]
        return torch.isin(*args, out=torch.ones(3, dtype=torch.int64, device=device))

    return call


def joined_into_its_first(device):
    nothing = torch.zeros(0, device=device)
    torch.cat((nothing, torch.zeros(2, 3, device=device)), out=nothing)


REFUSED = {
    "cat into nothing": (joined_into_its_first, "refer to a single memory location"),
    "dilation": (conv(1, dilation=-1), "dilation should be greater than zero"),
    "padding": (conv(3, padding=-1), "negative padding is not supported"),
    "aminmax into float64": (lowest_and_highest, "expected"),
    "isin into integers": (is_in(torch.arange(3), torch.arange(2)), "expected"),
    "isin a number": (is_in(torch.arange(3), 2), "expected"),
}


@pytest.mark.parametrize(("call", "says"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_refuse(call, says):
    with pytest.raises(RuntimeError):
        call("cpu")
    with pytest.raises(RuntimeError, match=says):
        call("jax")


def add_products(device, out):
    a, b = (torch.ones(shape, device=device) for shape in ((2, 2), (1, 2, 2)))
    torch.addbmm(a, b, b, out=out)


def log_sigmoid(device, out):
    torch._C._nn.log_sigmoid(torch.ones(3, device=device), out=out)


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("call", [add_products, log_sigmoid])
def test_an_out_that_grows_without_a_warning(call, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(device, torch.ones(7, device=device))
