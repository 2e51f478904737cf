"""Gradients, captures and training under `torch.autocast("jax")`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh

functional = torch.nn.functional


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Gradients -----------------------------------------------------------------------------------


def test_weights_keep_float32_gradients_also_when_used_twice():
    weight = draw(4, 4).to("jax").requires_grad_()
    x = draw(3, 4).to("jax")
    with torch.autocast("jax", torch.bfloat16):
        y = functional.linear(functional.linear(x, weight), weight)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert weight.grad.dtype == torch.float32
    same = draw(4, 4).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(functional.linear(draw(3, 4), same), same)
    y.float().square().sum().backward()
    scale = same.grad.abs().max().item()
    torch.testing.assert_close(weight.grad.cpu(), same.grad, rtol=0, atol=2**-7 * scale)


def test_custom_functions_see_the_region_of_their_forward():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="jax")
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="jax")
        def backward(ctx, gradient):
            _, b = ctx.saved_tensors
            product = gradient.float() @ b.t()
            seen.append(product.dtype)
            return product, None

    seen = []
    a, b = (torch.ones(2, 2, device="jax", requires_grad=True) for _ in range(2))
    with torch.autocast("jax", torch.bfloat16):
        y = Product.apply(a, b)
    y.float().sum().backward()
    assert (y.dtype, *seen, a.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    Product.apply(a, b).sum().backward()
    assert seen[1] == torch.float32


def test_custom_functions_may_ask_for_float32_and_leave_the_region():
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="jax", cast_inputs=torch.float32)
        def forward(ctx, a):
            seen.append((a.dtype, torch.is_autocast_enabled("jax")))
            return a * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="jax")
        def backward(ctx, gradient):
            return gradient * 2

    seen = []
    a = torch.ones(2, dtype=torch.bfloat16, device="jax", requires_grad=True)
    with torch.autocast("jax", torch.bfloat16):
        y = Twice.apply(a)
    y.sum().backward()
    assert seen == [(torch.float32, False)]
    assert (y.dtype, a.grad.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_again_in_the_same_region(reentrant):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).to("jax")
    linear, seen = model[0], []
    linear.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    x = draw(2, 4).to("jax").requires_grad_()
    with torch.autocast("jax", torch.bfloat16):
        y = checkpoint(model, x, use_reentrant=reentrant)
    y.float().sum().backward()
    assert seen == [torch.bfloat16] * 2
    assert linear.weight.grad.dtype == torch.float32


def test_transforms_of_torch_func():
    weight, x = draw(4, 4).to("jax"), draw(2, 4).to("jax")

    def loss(weight):
        with torch.autocast("jax", torch.bfloat16):
            y = functional.linear(x, weight)
        seen.append(y.dtype)
        return y.float().sum()

    seen = []
    assert torch.func.grad(loss)(weight).dtype == torch.float32
    assert seen == [torch.bfloat16]
    with torch.autocast("jax", torch.bfloat16):
        rows = torch.func.vmap(lambda row: functional.linear(row, weight))(x)
    assert rows.dtype == torch.bfloat16


# --- Captures ------------------------------------------------------------------------------------


def test_a_compiled_step_casts_inside_and_compiles_once():
    weight = torch.nn.Parameter(draw(4, 4).to("jax"))
    optimizer = torch.optim.AdamW([weight], 1e-2)

    @xs.compile
    def step(x):
        with torch.autocast("jax", torch.bfloat16):
            y = functional.linear(x, weight)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return y

    x = draw(8, 4).to("jax")
    results = [step(x) for _ in range(3)]
    assert {y.dtype for y in results} == {torch.bfloat16} and weight.dtype == torch.float32
    assert len(step.replays) == 1
    assert results[0].tolist() != results[2].tolist()


def test_a_compiled_step_called_in_another_region_is_another_program():
    weight = draw(4, 4).to("jax")
    step = xs.compile(lambda x: x @ weight)
    x, seen = draw(2, 4).to("jax"), []
    for low in (None, torch.bfloat16, torch.float16, None):
        with torch.autocast("jax", low or torch.bfloat16, enabled=low is not None):
            seen.append(step(x).dtype)
    assert seen == [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    assert len(step.replays) == 3


def test_inside_a_jax_function():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("jax", torch.bfloat16):
                return self.linear(x)

    f = iso.jax_function(Model())
    x = jax.numpy.ones((2, 4))
    assert jax.jit(f)(f.params, x).dtype == "bfloat16"
    loss = lambda params: f(params, x).astype("float32").sum()  # noqa: E731
    gradients = jax.jit(jax.grad(loss))(f.params)
    assert {gradient.dtype.name for gradient in gradients.values()} == {"float32"}


# --- Training ------------------------------------------------------------------------------------


class Vision(torch.nn.Module):
    """A convolution, a normalisation, attention and a perceptron."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 16, 3, padding=1)
        self.batch = torch.nn.BatchNorm2d(16)
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.batch(self.conv(x))), 2).flatten(2).mT
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x.mean(1))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor]] = {
    "vision": (Vision, draw(16, 2, 8, 8)),
    "lstm": (Recurrent, draw(16, 4, 6)),
}


def train(model: torch.nn.Module, x: torch.Tensor, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    target = (torch.arange(len(x)) % 5).to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
    return losses


@pytest.mark.filterwarnings("ignore::UserWarning:torch.backends.mkldnn")
@pytest.mark.parametrize("name", MODELS)
def test_training_follows_the_cpus_autocast(name):
    build, x = MODELS[name]
    torch.manual_seed(0)
    want = build()
    got = copy.deepcopy(want).to("jax")
    losses = [train(got, x.to("jax"), "jax")]
    with torch.backends.mkldnn.flags(enabled=name != "lstm"):  # some CPUs have none in bfloat16
        losses.append(train(want, x, "cpu"))
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=3e-2, atol=3e-2)
    assert losses[0][-1] < losses[0][0] - 0.02


def test_training_on_a_mesh_gives_the_same_losses():
    torch.manual_seed(0)
    plain = mlp()
    sharded = copy.deepcopy(plain)
    mesh = make_mesh((2, 4), ("data", "model"))
    iso.shard(sharded, mesh, iso.Plan({"0.weight": P("model", None), "*": P()}))
    x = draw(16, 6)
    one = train(plain.to("jax"), x.to("jax"), "jax")
    many = train(sharded, iso.shard(x, mesh, P("data", None)), "jax")
    torch.testing.assert_close(torch.tensor(many), torch.tensor(one), rtol=2e-2, atol=2e-2)
    assert sharded[0].weight.partition_spec == P("model")
