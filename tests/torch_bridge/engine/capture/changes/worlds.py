"""What a program has between two calls of a step, what it changes there, and how a case is run.

A case makes a `World` on a device: a step, and edits. There are three kinds:

- `row`: a step that reads something besides a tensor of 4 x 4, all of it written as text. As a
  layer of `scan_layers` it follows a product; in `gradient_accumulation` it is inside the loss.
- `modules`: the step is a forward and backward pass of a model, and the edits change the model.
- `trains`: the step is a whole training step, and the edits change model, optimizer, or what is
  around them.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

import isoshard.torch_bridge as xs
from isoshard.torch_xla_bridge.torch_xla.experimental.gradient_accumulation import (
    gradient_accumulation,
)

BY_DYNAMO = "torch.compile has no guard for it, on any device and with any backend"

WHOLE = ("scan", "accumulate")
"""Modes that a whole step does not have: what it reads is outside of layers and losses."""

TRAINS = (*WHOLE, "dynamo")
"""The same where `torch.compile` would be given the step of an optimizer."""


@dataclasses.dataclass
class World:
    """A program between two calls.

    Attributes:
        step: what is called, with `x` and the extra arguments.
        edits: each changes something, and the step is called after each.
        extra: arguments behind `x`, looked up at each call.
        state: numbers and tensors that must be those of the CPU after each call.
        close: called at the end.
        model: if there is one, `torch.compile` gets it, and not the step.
    """

    step: Callable[..., Any]
    edits: Sequence[Callable[[], Any]]
    extra: Callable[[], tuple[Any, ...]] = tuple
    state: Callable[[], Any] = dict
    close: Callable[[], Any] = tuple
    model: list[Any] | None = None

    def dynamo(self, backend: str) -> None:
        """Compile the model, or the step."""
        if self.model is not None:
            self.model[0] = torch.compile(self.model[0], backend=backend)
        else:
            self.step = torch.compile(self.step, backend=backend)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the matrix.

    Attributes:
        name: of the change.
        make: `(device, mode) -> World`; on the device "cpu" it is what the mode must equal.
        names: an error must contain one of them.
        against: "cpu" (torch's eager result), "lazy" (results of the `jax` device, step by step) or
            "pattern" (which calls have equal results, as on the CPU).
        without: modes that the case has no form in.
        rtol: relative tolerance.
        frozen: why dynamo itself does not see the edit.
        unseen: why no call of the reference shows the edit.
        called: edits after which the step is called; None for all.
        before: calls before the first edit.
    """

    name: str
    make: Callable[[str, str], World]
    names: tuple[str, ...]
    against: str = "cpu"
    without: tuple[str, ...] = ()
    rtol: float = 1e-5
    frozen: str = ""
    unseen: str = ""
    called: int | None = None
    before: int = 2


CASES: list[Case] = []


def picked(name: str, among: int) -> int:
    """A number below `among` that belongs to a name, so that a new case moves no other."""
    return zlib.crc32(name.encode()) % among


# --- Rows written as text ------------------------------------------------------------------------


def table(text: str, register: Any) -> None:
    r"""Register the rows of a table.

    A row has the positional arguments of the function with bars between, and behind a `!` the
    others as Python. Lines that are indented go on with the row; those with a # are comments. `\n`
    and `\t` are a new line and an indent of the statements.

    Args:
        text: the table.
        register: `row`, `modules` or `trains`, with its `known` as a `functools.partial`.
    """
    for line in text.replace("\n    ", " ").strip().splitlines():
        if line.startswith("#"):
            continue
        fields = [re.sub(r"\\n ?", "\n", one.strip()) for one in line.split(" |")]
        fields = [one.replace("\\t", "    ") for one in fields]
        options = fields.pop()[1:] if fields[-1].startswith("!") else ""
        register(*fields, **eval(f"dict({options})", dict(register.keywords["known"])))


VALUES = {"number": ("2.0", "5.0"), "tensor": ("two", "five")}
"""What a `$` in a row stands for: before the edit, and after it."""


def row(
    name: str,
    names: str,
    setup: str,
    body: str,
    *edits: str,
    kinds: Sequence[str] = ("number",),
    state: str = "{}",
    extra: str = "",
    close: str = "pass",
    scope: str = "",
    once: bool = False,
    known: dict[str, Any],
    **options: Any,
) -> None:
    """Register a step that is written as text.

    Args:
        name: of the change.
        names: see `Case`, with commas between.
        setup: statements that run first.
        body: an expression of `x`, or statements; empty if the setup defines `step`.
        *edits: statements, the step is called after each. The second is as the first, with the
            value from before, unless it is given; then every third row calls the step after it.
        kinds: what `$` stands for, a case for each.
        state: an expression of what must be as on the CPU after each call.
        extra: an expression of a second argument, `given`.
        close: statements that run at the end.
        scope: where the step is defined, "module" or "function"; by default the name decides.
        once: give loops one layer, and one batch: their Python code runs once for all of them, so
            what it does to Python objects is not done for each.
        known: names that the text may use.
        **options: see `Case`.
    """
    back = len(edits) < 2
    for kind in kinds:
        full = name if len(kinds) == 1 else f"{name}: {kind}"
        first, second = VALUES[kind]
        edits = (edits * 2)[: max(2, len(edits))]
        heads = {
            "step(x, given)" if extra else "step(x)": _returned(body),
            **{f"edit_{at}()": one for at, one in enumerate(edits)},
            "state()": f"return {state}",
            "close()": close,
            "extra()": f"return ({extra},)" if extra else "return ()",
        }
        nested = scope == "function" if scope else picked(full, 2) == 1
        text = _source(
            setup.replace("$", first),
            {
                head: part.replace("$", second if head == "edit_0()" else first)
                for head, part in heads.items()
            },
            nested,
        )

        def make(device: str, text: str = text, nested: bool = nested, count: int = len(edits)):
            tensors = {
                "two": torch.tensor(2.0, device=device),
                "five": torch.tensor(5.0, device=device),
            }
            space: dict[str, Any] = {**known, **tensors, "device": device, "__name__": "row"}
            exec(compile(text, "<row>", "exec"), space)
            found = space["made"] if nested else space
            edits = [found[f"edit_{at}"] for at in range(count)]
            return World(found["step"], edits, found["extra"], found["state"], found["close"])

        def build(device: str, mode: str, make: Any = make) -> World:
            return _read_in(mode, device, lambda: make(device), 1 if once else 2)

        called = 1 if back and edits and picked(full, 3) else len(edits)
        CASES.append(Case(full, build, tuple(names.split(", ")), called=called, **options))


def _returned(body: str) -> str:
    return body if "return" in body or not body else f"return {body}"


def _source(setup: str, parts: dict[str, str], nested: bool) -> str:
    """Functions after a setup, all of it in a module or in a function."""
    bound, lines = _bound(setup), setup.splitlines()
    for head, body in parts.items():
        if body:
            rebound = ", ".join(sorted(bound & _bound(body)))
            word = "nonlocal" if nested else "global"
            lines += [f"def {head}:", *([f"    {word} {rebound}"] if rebound else [])]
            lines += [f"    {line}" for line in body.splitlines()]
    if nested:
        lines = ["def make():", *(f"    {line}" for line in lines), "    return locals()"]
        lines.append("made = make()")
    return "\n".join(lines)


def _bound(code: str) -> set[str]:
    """The names that statements assign, functions and classes among them."""
    found: set[str] = set()
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.add(statement.name)
        else:
            stored = [one for one in ast.walk(statement) if isinstance(one, ast.Name)]
            found |= {one.id for one in stored if isinstance(one.ctx, ast.Store)}
    return found


def _read_in(mode: str, device: str, make: Callable[[], World], times: int) -> World:
    """The world, with its step as a layer, or in a loss."""
    models = [linear(seed).to(device) for seed in (1, 2)[:times]]  # before the case sets seeds
    world = make()
    if mode == "scan":
        blocks = xs.scan_layers(
            models, stacked=False, call=lambda layer, x, *extra: world.step(layer(x), *extra)
        )
        return dataclasses.replace(world, step=blocks)
    if mode == "accumulate":
        (model, *_), before = models, world.state

        def step(x: torch.Tensor, *extra: Any) -> torch.Tensor:
            model.zero_grad()
            return accumulated(lambda one: world.step(model(one), *extra).sum(), x, model, times)

        return dataclasses.replace(
            world, step=step, state=lambda: {**before(), "gradient": model.weight.grad}
        )
    return world


def accumulated(
    loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, model: Any, times: int = 2
) -> torch.Tensor:
    """The mean loss over batches, with gradients, as a loop or in turn."""
    batches = torch.stack([x, x + 0.5][:times])
    if x.device.type != "cpu":
        return gradient_accumulation(loss, (batches,), model)
    total = torch.zeros(())
    for one in batches:
        part = loss(one) / times
        if part.requires_grad:
            part.backward()
        total = total + part.detach()
    return total


# --- Models and their training -------------------------------------------------------------------


def edits_of(texts: Sequence[str], **known: Any) -> list[Callable[[], Any]]:
    """Edits written as text, which share names."""
    return [lambda text=text: exec(text, known) for text in texts]


def modules(
    name: str,
    names: str,
    make: str,
    *edits: str,
    known: dict[str, Any],
    once: bool = False,
    **options: Any,
) -> None:
    """Register changes of a model.

    Args:
        name: of the change.
        names: see `Case`, with commas between.
        make: an expression of a function that makes the model, on the CPU, with fixed numbers; it
            takes and returns 4 x 4.
        *edits: statements that change `net`.
        known: names that they may use.
        once: see `row`.
        **options: see `Case`.
    """

    def build(device: str, mode: str) -> World:
        times = 1 if once else 2
        layers = [
            eval(make, dict(known))().to(device) for _ in range(times if mode == "scan" else 1)
        ]
        model: Any = xs.scan_layers(layers, stacked=False) if mode == "scan" else layers[0]
        run = [model]

        def train(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            if mode == "accumulate":
                return accumulated(lambda one: run[0](one).square().sum(), x, model, times)
            loss = run[0](x).square().sum()
            if loss.requires_grad:
                loss.backward()
            return loss.detach()

        each = [edits_of(edits, **known, net=layer, device=device) for layer in layers]
        together = [lambda at=at: [one[at]() for one in each] for at in range(len(edits))]
        state = lambda: {"models": [state_of(layer, gradients=True) for layer in layers]}  # noqa: E731
        return World(train, together, state=state, model=run)

    CASES.append(Case(name, build, tuple(names.split(", ")), **options))


class Trainer:
    """A model, its optimizer, and a step of training.

    Args:
        device: of the model.
        make: the optimizer, from the parameters.

    Attributes:
        keeps: whether gradients are there after a step. A compiled step that clears and uses them
            keeps none, as its documentation says.
    """

    keeps = False

    def __init__(self, device: str, make: Callable[[Any], torch.optim.Optimizer]):
        self.device = device
        self.model: Any = torch.nn.Sequential(linear(1, bias=True), torch.nn.Tanh()).to(device)
        self.optimizer = make(self.model.parameters())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> Any:
        return {
            "model": state_of(self.model, gradients=self.keeps),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()["state"]),
        }


def trains(
    name: str,
    names: str,
    make: str,
    *edits: str,
    kind: Callable[..., Trainer] = Trainer,
    known: dict[str, Any],
    **options: Any,
) -> None:
    """Register changes of a `Trainer`, which the edits call `t`.

    Args:
        name: of the change.
        names: see `Case`, with commas between.
        make: an expression of a function from parameters to an optimizer.
        *edits: statements that change `t`.
        kind: of trainer.
        known: names that they may use.
        **options: see `Case`.
    """

    def build(device: str, mode: str) -> World:
        trainer = kind(device, eval(make, dict(known)))
        return World(trainer.step, edits_of(edits, **known, t=trainer), state=trainer.state)

    CASES.append(Case(name, build, tuple(names.split(", ")), **{"without": TRAINS, **options}))


def linear(seed: int, bias: bool = False) -> torch.nn.Linear:
    """A layer of 4 x 4 with numbers of its own."""
    layer = torch.nn.Linear(4, 4, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.sin(torch.arange(16.0) * (seed + 0.3)).reshape(4, 4) * 0.5)
        if bias:
            layer.bias.copy_(torch.arange(4.0) / 8 - 0.2)
    return layer


def state_of(module: torch.nn.Module, gradients: bool = False) -> Any:
    """Parameters, buffers, modes, and, if asked for, gradients."""
    kept = dict(module.named_parameters()) if gradients else {}
    return {
        "tensors": dict(module.named_parameters()) | dict(module.named_buffers()),
        "gradients": {name: one.grad for name, one in kept.items()},
        "training": [one.training for one in module.modules()],
    }
