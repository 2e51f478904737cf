"""Models and optimizers on the `jax` device train as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan, make_mesh

functional = torch.nn.functional


def close(got: torch.Tensor, want: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=rtol, atol=atol)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Models --------------------------------------------------------------------------------------


class Cnn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.pool = torch.nn.MaxPool2d(2)
        self.deep = torch.nn.Conv2d(8, 8, 3, stride=2, bias=False)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.conv(x))))
        return self.head(
            functional.adaptive_avg_pool2d(torch.nn.functional.gelu(self.deep(x)), 1)[..., 0, 0]
        )


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 8, num_layers=1, batch_first=True)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8, padding_idx=0)
        self.bag = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(self.table(x)).mean(1))


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.encoder(x, mask=mask).mean(1))


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor]] = {
    "mlp": (mlp, draw(8, 6)),
    "cnn": (Cnn, draw(4, 2, 10, 10)),
    "transformer": (Encoder, draw(4, 6, 16)),
    "lstm": (Recurrent, draw(4, 5, 6)),
    "embedding": (Words, torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(1))),
}


def make(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    build, x = MODELS[name]
    return build(), x, torch.arange(len(x)) % 5


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_a_step_equal_the_cpu(name):
    want, x, y = make(name)
    got = copy.deepcopy(want).to("jax")
    for model, device in ((want, "cpu"), (got, "jax")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        model.loss = loss.detach()
        xs.sync()
    close(got.loss, want.loss)
    for (key, g), (_, w) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        close(g.grad, w.grad), close(g, w)
        assert isinstance(g, torch.nn.Parameter), key
    for g, w in zip(got.buffers(), want.buffers(), strict=True):
        close(g, w)


def test_a_transformer_on_a_mesh_equals_the_cpu():
    want, x, y = make("transformer")
    got = copy.deepcopy(want)
    mesh = make_mesh((2, 4), ("data", "model"))
    plan = Plan(
        {
            "*.in_proj_weight": P("model", None),
            "*.linear1.weight": P("model", None),
            "*.linear2.weight": P(None, "model"),
            "*": P(),
        }
    )
    iso.shard(got, mesh, plan)
    functional.cross_entropy(want(x), y).backward()
    logits = got(iso.shard(x, mesh, P("data", None, None)))
    functional.cross_entropy(logits, iso.shard(y, mesh, P("data"))).backward()
    for g, w in zip(got.parameters(), want.parameters(), strict=True):
        close(g.grad, w.grad)


# --- Optimizers ----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **o: torch.optim.SGD(p, 0.1, **o),
    "momentum": lambda p, **o: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, 1e-2, **o),
    "amsgrad": lambda p, **o: torch.optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.1, **o),
    "adamw": lambda p, **o: torch.optim.AdamW(p, 1e-2, **o),
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1, **o),
    "nadam": lambda p, **o: torch.optim.NAdam(p, 1e-2, **o),
    "radam": lambda p, **o: torch.optim.RAdam(p, 1e-2, **o),
    "adamax": lambda p, **o: torch.optim.Adamax(p, 1e-2, **o),
    "adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
}


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_the_cpu(name, foreach):
    if name in ("radam", "adamax", "adadelta") and foreach:
        foreach = None  # torch's own choice
    want, x, y = make("mlp")
    got = copy.deepcopy(want).to("jax")
    for model, device in ((want, "cpu"), (got, "jax")):
        optimizer = OPTIMIZERS[name](model.parameters(), foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    for g, w in zip(got.parameters(), want.parameters(), strict=True):
        close(g, w, rtol=1e-3)


@pytest.mark.parametrize("foreach", [False, None])
@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_clip_grad_norm_equals_the_cpu(norm, foreach):
    want, x, y = make("mlp")
    got = copy.deepcopy(want).to("jax")
    norms = []
    for model, device in ((want, "cpu"), (got, "jax")):
        functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm, foreach=foreach))
    close(norms[1], norms[0])
    for g, w in zip(got.parameters(), want.parameters(), strict=True):
        close(g.grad, w.grad)


def test_clip_grad_value_and_an_optimizers_state_dict():
    want, x, y = make("mlp")
    got = copy.deepcopy(want).to("jax")
    states = []
    for model, device in ((want, "cpu"), (got, "jax")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        again = torch.optim.AdamW(model.parameters(), lr=1.0)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        again.step()
        states.append(again.state_dict())
    for key, state in states[0]["state"].items():
        close(states[1]["state"][key]["exp_avg"], state["exp_avg"])
        assert states[1]["state"][key]["exp_avg"].device.type == "jax"
        assert states[1]["state"][key]["step"] == state["step"] == 2


def test_a_closure_and_lbfgs():
    want = torch.nn.Parameter(draw(5))
    got = torch.nn.Parameter(draw(5).to("jax"))
    for p in (want, got):
        optimizer = torch.optim.LBFGS([p], max_iter=3)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = ((p - 1) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    close(got, want, rtol=1e-3)
