"""torch's autograd and optimizers on the `jax` device: the numbers of the CPU, and its errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("foreach", [False, True, None])
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


# --- Autograd ------------------------------------------------------------------------------------


def both(function: Callable[[torch.Tensor], Any], *shape: int) -> None:
    """Compare tensors that a function returns for a leaf on each device."""
    data = draw(*(shape or (3, 4)))
    want = function(data.clone().requires_grad_())
    got = function(data.clone().to("jax").requires_grad_())
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_tensor_hooks():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        y = x.sin()
        y.register_hook(lambda g: g * 3)
        handle = y.register_hook(lambda g: g * 100)
        handle.remove()
        x.register_hook(seen.append)
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad * 2))
        y.retain_grad()
        (y * y).sum().backward()
        return [x.grad, y.grad, *seen]

    both(program)


def test_module_hooks():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        seen: list[torch.Tensor] = []
        layer = torch.nn.Linear(4, 2).to(x.device)
        layer.register_forward_pre_hook(lambda m, inputs: (inputs[0] * 2,))
        layer.register_forward_hook(lambda m, inputs, output: output + 1)
        layer.register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
        layer.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        out = layer(x)
        out.square().sum().backward()
        return [out, x.grad, layer.weight.grad, *seen]

    both(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(x.device)
        y = checkpoint(block, x, use_reentrant=reentrant)
        y = checkpoint(lambda a: torch.sin(a) * a, y, use_reentrant=reentrant)
        y.sum().backward()
        return [x.grad, block[0].weight.grad]

    both(program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_its_dropout(reentrant):
    x = torch.ones(64, device="jax", requires_grad=True)
    y = checkpoint(lambda a: functional.dropout(a * 1, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert 0 < y.count_nonzero().item() < 64


class Clamped(torch.autograd.Function):
    """A user's own derivative: straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bound: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 2 * ctx.bound), None


def test_a_users_own_function():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = Clamped.apply(x, 0.5)
        (y * 3).sum().backward()
        return [y, x.grad]

    both(program)


def test_retain_graph_and_accumulation():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        loss = (x**3).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
        (x * 2).sum().backward()
        return [first, x.grad]

    both(program)
    x = torch.ones(2, device="jax", requires_grad=True)
    loss = (x**2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time"):
        loss.backward()


def test_double_backward():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = (x.tanh() @ x.exp().t()).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.square().sum().backward()
        return [g, x.grad]

    both(program)


def test_gradient_penalty_of_an_mlp():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1)
        )
        model.to(x.device)
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((g.norm(dim=1) - 1) ** 2).mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    both(program)


def test_autograd_grad_and_unused_inputs():
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        unused = torch.ones(2, device=x.device, requires_grad=True)
        got = torch.autograd.grad(x.sin().sum(), (x, unused), allow_unused=True)
        assert got[1] is None
        return [got[0], *torch.autograd.grad(x * 2, x, torch.ones_like(x))]

    both(program)


def test_no_grad_inference_mode_and_detach():
    x = torch.ones(3, device="jax", requires_grad=True)
    with torch.no_grad():
        y = x * 2
    assert not y.requires_grad and y.grad_fn is None
    with torch.no_grad(), torch.enable_grad():
        assert (x * 2).requires_grad
    with torch.inference_mode():
        z = x * 3
    assert z.tolist() == [3, 3, 3]
    (x.detach() * x).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_gradients_accumulate_over_micro_batches():
    want, x, y = make("mlp")
    got = copy.deepcopy(want).to("jax")
    functional.cross_entropy(want(x), y).backward()
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (functional.cross_entropy(got(a.to("jax")), b.to("jax")) / 4).backward()
        xs.sync()
    for g, w in zip(got.parameters(), want.parameters(), strict=True):
        close(g.grad, w.grad)


def test_zero_grad_keeps_or_drops_the_memory():
    x = torch.nn.Parameter(torch.ones(3, device="jax"))
    optimizer = torch.optim.SGD([x], lr=1.0)
    x.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert x.grad.tolist() == [0, 0, 0]
    x.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    optimizer.zero_grad()
    assert x.grad is None


def test_func_transforms_and_functional_call():
    model = mlp().to("jax")
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.func.functional_call(model, values, draw(2, 6).to("jax")).count_nonzero() == 0


def test_autocast_computes_in_bfloat16():
    x = draw(4, 6).to("jax")
    layer = torch.nn.Linear(6, 3).to("jax")
    with torch.autocast("jax", dtype=torch.bfloat16):
        y = layer(x)
        total = y.softmax(-1).sum()
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_anomaly_mode_and_leaves():
    x = torch.ones(3, device="jax", requires_grad=True)
    assert x.is_leaf and x.grad_fn is None and (x * 2).grad_fn is not None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to("jax")):
        (x.exp()).sum().backward()
    np.testing.assert_allclose(x.grad.cpu(), np.full(3, np.e), rtol=1e-6)


# --- Errors arrive as exceptions, all in this one process ----------------------------------------


class BadBackward(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")


class BadShape(torch.autograd.Function):
    """Gives a gradient of the wrong shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.ones(7, device="jax")


class Missing(torch.autograd.Function):
    """Meets an operator without a lowering, inside dispatch, during backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.ops.isoshard_autograd_tests.nothing(g)


class BadForward(torch.autograd.Function):
    """Raises in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in forward")

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


@torch.library.custom_op("isoshard_autograd_tests::nothing", mutates_args=())
def nothing(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody taught JAX."""
    return x.clone()


@nothing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _raise(where: str) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError(where)

    return fail


def _tensor_hook(x: torch.Tensor) -> None:
    y = x * 2
    y.register_hook(_raise("in a hook"))
    y.sum().backward()


def _module_hook(x: torch.Tensor) -> None:
    layer = torch.nn.Linear(3, 2).to("jax")
    layer.register_full_backward_hook(_raise("in a module hook"))
    layer(x).sum().backward()


def _forward_hook(x: torch.Tensor) -> None:
    layer = torch.nn.Linear(3, 2).to("jax")
    layer.register_forward_hook(_raise("in a forward hook"))
    layer(x)


def _checkpointed(x: torch.Tensor) -> None:
    calls: list[int] = []

    def block(a: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError("in recomputation")
        return a.sin()

    checkpoint(block, x, use_reentrant=False).sum().backward()


def _post_accumulate(x: torch.Tensor) -> None:
    x.register_post_accumulate_grad_hook(_raise("after accumulation"))
    x.sum().backward()


def _step_hook(x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([x], lr=0.1)
    optimizer.register_step_pre_hook(_raise("before the step"))
    x.sum().backward()
    optimizer.step()


ERRORS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "forward": (lambda x: BadForward.apply(x), ZeroDivisionError, "in forward"),
    "backward": (lambda x: BadBackward.apply(x).sum().backward(), ZeroDivisionError, "in backward"),
    "gradient of the wrong shape": (
        lambda x: BadShape.apply(x).sum().backward(),
        RuntimeError,
        r"invalid gradient at index 0",
    ),
    "dispatch in backward": (
        lambda x: Missing.apply(x).sum().backward(),
        NotImplementedError,
        r"register_lowering",
    ),
    "dispatch in forward": (
        lambda x: torch.ops.isoshard_autograd_tests.nothing(x.detach()),
        NotImplementedError,
        r"register_lowering",
    ),
    "shapes in forward": (lambda x: x @ torch.ones(9, device="jax"), RuntimeError, r"size|shape"),
    "no scalar": (lambda x: (x * 2).backward(), RuntimeError, r"only for scalar outputs"),
    "no gradient": (lambda x: x.detach().sum().backward(), RuntimeError, r"does not require grad"),
    "tensor hook": (_tensor_hook, ZeroDivisionError, "in a hook"),
    "module hook": (_module_hook, ZeroDivisionError, "in a module hook"),
    "forward hook": (_forward_hook, ZeroDivisionError, "in a forward hook"),
    "recomputation": (_checkpointed, ZeroDivisionError, "in recomputation"),
    "post accumulate hook": (_post_accumulate, ZeroDivisionError, "after accumulation"),
    "optimizer hook": (_step_hook, ZeroDivisionError, "before the step"),
    "integer gradient": (
        lambda x: torch.ones(3, dtype=torch.int64, device="jax").requires_grad_(),
        RuntimeError,
        r"floating point",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_arrives_as_an_exception_and_work_goes_on(name):
    function, error, message = ERRORS[name]
    for _ in range(3):
        x = torch.arange(3.0).to("jax").requires_grad_()
        with pytest.raises(error, match=message):
            function(x)
        x.grad = None
        x._backward_hooks = None
        y = x.detach().requires_grad_()
        (y * y).sum().backward()
        assert y.grad.tolist() == [0, 2, 4]


def test_an_error_on_another_thread_arrives_there():
    import concurrent.futures

    def work(fail: bool) -> list[float]:
        x = torch.arange(3.0).to("jax").requires_grad_()
        y = BadBackward.apply(x) if fail else x * x
        y.sum().backward()
        return x.grad.tolist()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(work, False), pool.submit(work, True)
        assert good.result() == [0, 2, 4]
        with pytest.raises(ZeroDivisionError, match="in backward"):
            bad.result()


def test_a_tensor_recorded_on_one_thread_can_be_used_on_another():
    import concurrent.futures

    x = torch.arange(3.0).to("jax") * 2
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        y = pool.submit(lambda: x + 1).result()
    assert (x + y).tolist() == [1, 5, 9]
