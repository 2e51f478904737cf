"""`torch.utils.checkpoint`: recomputation gives the same gradients, and draws the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
)

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from tests.torch_bridge.on_both import on_both, raises_on_both
from tests.torch_bridge.training.test_training import close, draw

functional = torch.nn.functional
BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])


def block(width: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.LayerNorm(width),
        torch.nn.GELU(),
        torch.nn.Linear(width, width),
    )


def test_keyword_arguments_nested_results_and_none():
    def inner(x: torch.Tensor, scale: float, pair: Any, *, none: None) -> Any:
        assert none is None
        return x.sin() * scale, {"b": pair[0].exp()}

    def program(x: torch.Tensor) -> Any:
        first, rest = checkpoint(inner, x, 3.0, (x, 1), none=None, use_reentrant=False)
        (first.sum() + rest["b"].sum()).backward()
        return first, rest["b"], x.grad

    on_both(program)


@BOTH
def test_a_stack_of_checkpointed_layers_trains_as_the_cpu(reentrant):
    def program(x: torch.Tensor) -> Any:
        layers = torch.nn.ModuleList([block(), block()]).to(x.device)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            y = x
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=reentrant)
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, list(layers.parameters())

    on_both(program, rtol=1e-3, atol=1e-4)


@BOTH
def test_checkpoints_in_checkpoints_and_sequences(reentrant):
    def nested(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=reentrant) + x

    def program(x: torch.Tensor) -> Any:
        model = torch.nn.Sequential(*[block() for _ in range(2)]).to(x.device)
        y = checkpoint(nested, x, use_reentrant=reentrant)
        checkpoint_sequential(model, 2, y, use_reentrant=reentrant).sum().backward()
        return x.grad, [p.grad for p in model.parameters()]

    on_both(program)


def test_dropout_is_repeated_with_the_same_numbers(mesh):
    """The mask of the recomputation is that of the forward pass, and the stream then goes on."""
    x = iso.shard(draw(8, 16), mesh, P("x", "y"))
    results = []
    for recompute in (False, True):
        torch.manual_seed(3)
        leaf = x.detach().clone().requires_grad_()

        def layer(a: torch.Tensor) -> torch.Tensor:
            return functional.dropout(functional.dropout(a, 0.5).exp(), 0.25)

        y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
        after = torch.rand(4, device="jax")
        y.sum().backward()
        later = torch.rand(4, device="jax")
        results.append([y.detach().cpu(), leaf.grad.cpu(), after.cpu(), later.cpu()])
    plain, recomputed = results
    for got, want in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(got, want)
    assert not torch.equal(plain[2], plain[3])


def test_recomputation_happens_once_and_stops_early():
    calls: list[str] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append("start")
        y = x.exp()
        z = y.sin()
        calls.append("end")
        return z.sum()

    on_cpu = draw(3).requires_grad_()
    checkpoint(layer, on_cpu, use_reentrant=False).backward()
    wanted = calls.copy()
    calls.clear()
    x = draw(3).to("jax").requires_grad_()
    checkpoint(layer, x, use_reentrant=False).backward()
    assert calls == wanted and calls[:3] == ["start", "end", "start"]
    close(x.grad, draw(3).exp().cos() * draw(3).exp())


def test_selective_checkpointing_keeps_what_the_policy_says():
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def program(x: torch.Tensor) -> Any:
        model = block().to(x.device)
        y = checkpoint(
            model,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        y.sum().backward()
        return y, x.grad, [p.grad for p in model.parameters()]

    on_both(program)


def test_a_recomputation_that_differs_is_refused():
    def program(x: torch.Tensor) -> None:
        sizes = iter([4, 2])

        def layer(a: torch.Tensor) -> torch.Tensor:
            return a[:, : next(sizes)].exp().sin()

        checkpoint(layer, x, use_reentrant=False).sum().backward()

    raises_on_both(program, match=r"Recomputed values for the following tensors have different")


def test_the_debugging_form_shows_the_operations():
    def program(x: torch.Tensor, debug: bool) -> None:
        calls = iter([True, False])

        def layer(a: torch.Tensor) -> torch.Tensor:
            return a.exp().sin() if next(calls) else a.exp() * 1

        with set_checkpoint_debug_enabled(debug):
            checkpoint(layer, x, use_reentrant=False).sum().backward()

    shown = r"(?s)Operations executed during the original forward"
    raises_on_both(lambda x: program(x, True), match=shown)
    raises_on_both(lambda x: program(x, False), match=r"A different number of tensors was saved")


def test_in_a_compiled_step_the_losses_are_those_of_the_plain_one():
    """Checkpoints with dropout inside `xs.compile`: same numbers, same parameters."""

    def train(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
        ).to("jax")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            y = checkpoint(model, x, use_reentrant=True)
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = xs.compile(step) if compiled else step
        x = draw(8, 4).to("jax").requires_grad_()
        return [*(run(x).item() for _ in range(4)), [p.tolist() for p in model.parameters()]]

    want, got = train(False), train(True)
    assert got[:4] == pytest.approx(want[:4], rel=1e-5) and len(set(want[:4])) == 4
    torch.testing.assert_close(
        [torch.tensor(p) for p in got[4]], [torch.tensor(p) for p in want[4]]
    )
