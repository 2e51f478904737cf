"""`checkpoint_module`: what backward computes again reads parameters that waited for the gradient.

Split over devices, a parameter is gathered once for each pass; none is kept whole between them.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import Plan
from isoshard.torch_bridge.recompute import checkpoint_module

LAYERS, WIDTH, ROWS = 2, 8, 8
PLAN = Plan.fsdp("data", min_bytes=1024) * Plan.batch_activations("data")


class Block(nn.Module):
    """A residual layer with two products."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def planned(layers: nn.Sequential) -> Any:
    """The estimate of a training step on eight chips, by XLA's partitioner."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = layers(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    mesh = iso.planner.topology("v5e:2x4").mesh((8,), ("data",))
    x = torch.empty(64, 256, device="meta")
    how = {"depth": "partition", "repeats": False, "progress": False}
    return iso.planner.estimate(step, (x,), mesh, PLAN, **how)


def test_a_split_weight_is_gathered_for_each_pass_and_not_kept():
    with torch.device("meta"):
        kept = nn.Sequential(*[Block(256) for _ in range(3)])
    again = copy.deepcopy(kept)
    for layer in again:
        checkpoint_module(layer)
    reports = [planned(kept), planned(again)]
    whole = 256 * 1024 * 4
    gathered = [
        sum(
            one.count
            for one in report.collectives
            if (one.kind, one.bytes) == ("all-gather", whole)
        )
        for report in reports
    ]
    assert gathered == [6, 12]
    kept, again = (report.memory.peak for report in reports)
    assert again < kept - 3 * whole  # of six weights most are not kept


# --- Gradients ------------------------------------------------------------------------------------


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(model: nn.Module, x: torch.Tensor, how: str) -> list[torch.Tensor]:
    """Loss and gradients, found in one of several ways."""
    if how == "jax_function":
        f = iso.jax_function(model)
        used = {name for name, one in model.named_parameters() if "unused" not in name}
        wanted = {name for name, one in model.named_parameters() if one.requires_grad} & used

        def loss_of(params, x):
            return (f({**f.params, **params}, x) ** 2).mean()

        params = {name: f.params[name] for name in wanted}
        value, gradients = jax.jit(jax.value_and_grad(loss_of))(params, iso.to_jax(x))
        found = [value, *[gradients[n] for n, _ in model.named_parameters() if n in wanted]]
        return [torch.tensor(one.tolist()) for one in found]

    def step(x):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    run = xs.compile(step) if how == "compile" else step
    losses = [run(x) for _ in range(2)]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [one.detach().cpu().double() for one in (losses[-1], *gradients)]


class Tied(nn.Module):
    """One weight in two places, and a module shared with others."""

    def __init__(self, shared: nn.Module):
        super().__init__()
        self.up, self.shared = nn.Linear(WIDTH, WIDTH), shared
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Frozen(Block):
    """With a weight that is not trained, one that is not used, and a buffer that scales."""

    def __init__(self):
        super().__init__()
        self.up.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class Recurrent(nn.Module):
    """An LSTM keeps a list of its weights besides."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lstm(x[:, None])[0][:, 0]


def blocks(change: Any) -> nn.Module:
    return nn.Sequential(*[change(Block()) for _ in range(LAYERS)])


def tied(change: Any) -> nn.Module:
    shared = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(change(Tied(shared)), shared, change(Tied(shared)))


def frozen(change: Any) -> nn.Module:
    return nn.Sequential(*[change(Frozen()) for _ in range(2)])


def parametrized(change: Any) -> nn.Module:
    layers = [Block() for _ in range(2)]
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer.up)
        nn.utils.parametrize.register_parametrization(layer.down, "weight", nn.Tanh())
    return nn.Sequential(*map(change, layers))


def nested(change: Any) -> nn.Module:
    return change(nn.Sequential(change(Block()), nn.Sequential(change(Block()), nn.Tanh())))


def wrapped(change: Any) -> nn.Module:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    return nn.Sequential(change(Wrapper(Block())), Wrapper(change(Block())))


def recurrent(change: Any) -> nn.Module:
    return nn.Sequential(*[change(Recurrent()) for _ in range(2)])


@pytest.mark.parametrize(
    ("made", "how"),
    [
        (tied, "compile"),
        (frozen, "eager"),
        (frozen, "jax_function"),
        (parametrized, "compile"),
        (nested, "jax_function"),
        (wrapped, "eager"),
        (recurrent, "eager"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_gradients_are_those_of_the_cpu(made, how):
    torch.manual_seed(0)
    plain = made(lambda module: module)
    ours = copy.deepcopy(made(checkpoint_module))
    ours.load_state_dict(plain.state_dict())
    want = trained(copy.deepcopy(plain).double(), data(ROWS, WIDTH), "eager")
    got = trained(ours.to("jax"), data(ROWS, WIDTH).float().to("jax"), how)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-4, atol=2e-5)


def test_own_tensors_are_back_afterwards_also_after_an_error():
    class Fails(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                assert not isinstance(self.up.weight, nn.Parameter)
                raise ValueError("the second time")
            return super().forward(x)

    module = checkpoint_module(Fails().to("jax"))
    weights = dict(module.named_parameters())
    loss = module(data(2, WIDTH).float().to("jax")).sum()
    with pytest.raises(ValueError, match="the second time"):
        loss.backward()
    assert all(one is weights[name] for name, one in module.named_parameters())
    module(data(2, WIDTH).float().to("jax")).sum().backward()
    assert all(one is weights[name] and one.grad is not None for name, one in weights.items())


def test_hooks_of_parameters_and_modules_run_as_without():
    def seen(change: Any) -> dict[str, int]:
        torch.manual_seed(0)
        module = change(Block().to("jax"))
        counts: dict[str, int] = collections.Counter()
        module.up.weight.register_hook(lambda g: counts.update(weight=1) or 2 * g)
        module.down.weight.register_post_accumulate_grad_hook(lambda p: counts.update(after=1))
        module.up.register_full_backward_hook(lambda *_: counts.update(module=1))
        module(data(2, WIDTH).float().to("jax")).sum().backward()
        counts["sum"] = round(module.up.weight.grad.sum().item(), 3)
        return counts

    assert seen(checkpoint_module) == seen(lambda module: module)


def test_parameters_of_the_first_call_are_used_again():
    """Under `functional_call` the module has others by the time of backward."""
    torch.manual_seed(0)
    module = checkpoint_module(Block().to("jax"))
    twin = Block().to("jax")
    given = {n: (2 * p).detach().requires_grad_() for n, p in module.named_parameters()}
    twin.load_state_dict({name: one.detach() for name, one in given.items()})
    x = data(2, WIDTH).float().to("jax")
    torch.func.functional_call(module, given, (x,)).square().sum().backward()
    twin(x).square().sum().backward()
    for name, one in twin.named_parameters():
        torch.testing.assert_close(given[name].grad.cpu(), one.grad.cpu(), rtol=1e-4, atol=1e-5)
    assert all(one.grad is None for one in module.parameters())


def test_dropout_draws_the_same_numbers_again():
    def gradients(change: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[change(Block(dropout=0.5)) for _ in range(1)]).to("jax")
        torch.manual_seed(5)
        return trained(model, data(ROWS, WIDTH).float().to("jax"), "compile")

    for one, other in zip(gradients(checkpoint_module), gradients(lambda one: one), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("made", "stacked"), [("frozen", False), ("blocks under FSDP", True)])
def test_scanned_layers(made, stacked):
    torch.manual_seed(0)
    plain = (frozen if made == "frozen" else blocks)(lambda module: module)
    ours = copy.deepcopy(plain)
    scanned = xs.scan_layers([checkpoint_module(one) for one in ours], stacked=stacked).to("jax")
    trained(plain.double(), data(ROWS, WIDTH), "eager")
    x = data(ROWS, WIDTH).float().to("jax")
    if "FSDP" in made:
        mesh = iso.make_mesh((8,), ("data",))
        scanned = iso.shard(scanned, mesh, Plan.fsdp("data", min_bytes=0))
        x = iso.shard(x, mesh, iso.P("data"))
    trained(scanned, x, "compile")
    if stacked:
        got = {
            f"{number}.{name}": None if one.grad is None else one.grad[number]
            for name, one in scanned.layers.named_parameters()
            for number in range(len(plain))
        }
    else:
        got = {
            name: one.grad
            for (name, _), one in zip(plain.named_parameters(), scanned.parameters(), strict=True)
        }
    for name, one in plain.named_parameters():
        if one.grad is None:
            assert got[name] is None or not got[name].any()
        else:
            torch.testing.assert_close(got[name].cpu().double(), one.grad, rtol=1e-3, atol=1e-5)
