"""Models and optimizers on the `jax` device train as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

import isoshard.torch_bridge as xs

functional = torch.nn.functional


def close(
    got: torch.Tensor,
    want: torch.Tensor,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    where: str = "",
) -> None:
    describe = lambda text: f"{where}: {text}"  # noqa: E731
    torch.testing.assert_close(
        got.detach().cpu(), want.detach(), rtol=rtol, atol=atol, msg=describe
    )


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


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8, padding_idx=0)
        self.bag = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(self.table(x)).mean(1))


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor]] = {
    "mlp": (mlp, draw(8, 6)),
    "cnn": (Cnn, draw(4, 2, 10, 10)),
    "embedding": (Words, torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(1))),
}


def make(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    build, x = MODELS[name]
    return build(), x, torch.arange(len(x)) % 5


def test_loss_gradients_and_a_step_equal_the_cpu():
    """Of all models, as one program."""
    made = []
    for name in MODELS:
        want, x, y = make(name)
        got = copy.deepcopy(want).to("jax")
        for model, device in ((want, "cpu"), (got, "jax")):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            model.loss = loss.detach()
        made.append((name, got, want))
    xs.sync()
    for name, got, want in made:
        close(got.loss, want.loss, where=name)
        for (key, g), (_, w) in zip(got.named_parameters(), want.named_parameters(), strict=True):
            close(g.grad, w.grad, where=f"{name} {key}"), close(g, w, where=f"{name} {key}")
            assert isinstance(g, torch.nn.Parameter), key
        for g, w in zip(got.buffers(), want.buffers(), strict=True):
            close(g, w, where=name)
