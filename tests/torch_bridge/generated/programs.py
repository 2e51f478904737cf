"""Programs of users as source text, written by rules: where a state lives, how it changes, by which
public verb a value passes, and who calls the step.

A program is run on CPU torch, where a verb of isoshard does nothing, and on the `jax` device, in
each way to run it. The values of every call and the state afterwards are compared, so an old value
cannot pass. No name is used twice: a guard on a global that is called like a local hides faults.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs

CALLS = 3
SIZE = 8

HOMES = {
    "attribute": ("{box} = Holder()\n{box}.{field} = START()", "{box}.{field}"),
    "item of a dict": ("{box} = {{'{field}': START()}}", "{box}['{field}']"),
    "item of a list": ("{box} = [START()]", "{box}[0]"),
    "variable": ("{box} = START()", "{box}"),
    "buffer": ("{box} = Buffers()\n{box}.register_buffer('{field}', START())", "{box}.{field}"),
}
UPDATES = {
    "assigned": "{state} = {state} + {value}",
    "assigned a decayed one": "{state} = 0.5 * {state} + {value}.tanh()",
    "assigned without its graph": "{state} = ({state} + {value}).detach()",
    "assigned the argument": "{state} = {value}",
    "changed, then assigned": "{state}.mul_(0.5)\n{state} = {state} + {value}",
    "augmented": "{state} += {value}",
    "added to": "{state}.add_({value})",
    "copied into": "{state}.copy_({state} + {value})",
}
RESULTS = {
    "itself": "{state}",
    "a copy": "{state} * 1",
    "it and a number": "({state}, {value}.sum())",
    "another value": "{value}.sum()",
}
SCOPES = ("module", "function", "method")


@dataclasses.dataclass(frozen=True)
class Program:
    """A step as text.

    Attributes:
        title: for the test's name.
        setup: statements that run before the step is defined.
        body: those of the step, whose argument is `{value}`.
        state: the expression of the state after a call; empty for none.
        scope: where the step is defined: "module", "function" or "method".
        traits: what it was made from, as the keys of the tables here.
    """

    title: str
    setup: str
    body: str
    state: str
    scope: str
    traits: tuple[str, ...]

    def source(self) -> str:
        """The text; `make(wrap)` of it gives `wrap` of the step, and a reader of its state."""
        names = _names(self)
        setup, body, state = (part.format(**names) for part in (self.setup, self.body, self.state))
        step, value, me = names["step"], names["value"], names["me"]
        rebinds = names["box"] if self.state == "{box}" else ""
        read = f"def seen():\n    return {state or None}"
        match self.scope:
            case "module":
                glob = f"global {rebinds}\n" if rebinds else ""
                define = f"def {step}({value}):\n" + _indented(glob + body)
                return (
                    f"{setup}\n{define}\n{read}\ndef make(wrap):\n    return wrap({step}), seen\n"
                )
            case "function":
                glob = f"nonlocal {rebinds}\n" if rebinds else ""
                define = f"def {step}({value}):\n" + _indented(glob + body)
                inner = f"{setup}\n{define}\n{read}\nreturn wrap({step}), seen"
                return f"def make(wrap):\n{_indented(inner)}"
            case _:
                mine = f"{me}.{names['box']}"
                setup, body, state = (
                    part.format(**names | {"box": mine})
                    for part in (self.setup, self.body, self.state)
                )
                made = f"def __init__({me}):\n{_indented(setup)}\n"
                run = f"def {step}({me}, {value}):\n{_indented(body)}"
                held = state.replace(f"{me}.", "object_.", 1) if state else "None"
                inner = (
                    f"object_ = {names['kind']}()\n"
                    f"def seen():\n    return {held}\n"
                    f"return wrap(object_.{step}), seen"
                )
                return (
                    f"class {names['kind']}:\n{_indented(made + run)}\n"
                    f"def make(wrap):\n{_indented(inner)}"
                )


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


_WORDS = (
    "birch cedar elm fir hazel larch maple oak pine rowan spruce willow yew alder aspen".split()
)


def _names(program: Program) -> dict[str, str]:
    """Names for a program: others in each, and none that the package uses."""
    draw = np.random.default_rng(zlib.crc32(program.title.encode()))
    picked = [f"{_WORDS[at]}_{number}" for at, number in zip(
        draw.permutation(len(_WORDS)), draw.integers(100, 999, len(_WORDS)), strict=True
    )]  # fmt: skip
    keys = ("box", "field", "step", "value", "me", "kind")
    return dict(zip(keys, picked, strict=False))


def stateful() -> Iterator[Program]:
    """A state in each home, changed in every second way; scopes and results in turn."""
    for (at, (home, (setup, state))), (on, (change, update)) in itertools.product(
        enumerate(HOMES.items()), enumerate(UPDATES.items())
    ):
        if (at + on) % 2 == 0:
            continue
        scope = SCOPES[(at + 2 * on) % len(SCOPES)]
        result, value = list(RESULTS.items())[(at + 3 * on) // 2 % len(RESULTS)]
        body = f"{update}\nreturn {value}".replace("{state}", state)
        title = f"{home}, {change}, returns {result}, in a {scope}"
        yield Program(title, setup, body, state, scope, (home, change, result))


VERBS = {
    "shard": ("iso.shard({value}, MESH, P('a'))", "{value}"),
    "shard to nothing": ("iso.shard({value}, MESH, P())", "{value}"),
    "reshard": ("iso.reshard(iso.shard({value}, MESH, P()), P('a'))", "{value}"),
    "full": ("iso.full({value})", "{value}"),
    "to_jax and back": ("iso.to_torch(iso.to_jax({value}) * 2)", "{value} * 2"),
    "copied to_jax and back": ("iso.to_torch(iso.to_jax({value}, copy=True) * 2)", "{value} * 2"),
    "torch_function": ("TRIPLE({value})", "{value} * 3"),
    "jax_function": ("iso.to_torch(LAYER(LAYER.params, iso.to_jax({value})))", "WEIGHT * {value}"),
    "torch_module": ("MODULE({value})", "WEIGHT * {value}"),
    "mark_sharding": ("xs.mark_sharding({value}, MESH, ('a',))", "{value}"),
    "mark_sharding_with_gradients": (
        "xs.mark_sharding_with_gradients({value}, MESH, ('a',))",
        "{value}",
    ),
    "shard_as": ("xs.shard_as({value} * 1, {value})[0]", "{value}"),
    "redistribute": (
        "xs.mark_sharding({value}, MESH, ('a',)).redistribute(placements=[Replicate()])",
        "{value}",
    ),
    "clear_sharding": ("cleared({value})", "{value}"),
    "checkpoint": (
        "checkpoint(lambda part: iso.shard(part, MESH, P('a')) * 2, {value}, use_reentrant=False)",
        "{value} * 2",
    ),
    "numbers": ("{value} * float(iso.to_jax({value}).sum())", "{value} * {value}.sum()"),
}
"""By name: an expression with the verb, and what it is without isoshard."""

ARGUMENTS = {"held": "{value}", "computed": "({value} + 1)"}


def verbs() -> Iterator[tuple[Program, Program]]:
    """A step that begins with each public verb, and the same without it."""
    for (at, (verb, expressions)), (on, (argument, value)) in itertools.product(
        enumerate(VERBS.items()), enumerate(ARGUMENTS.items())
    ):
        scope = SCOPES[(at + on) % 2]
        title = f"{verb} of what is {argument}, in a {scope}"
        with_it, without = (
            Program(
                title,
                "",
                f"return ({text.replace('{value}', value)}) - 0.25",
                "",
                scope,
                (verb, argument),
            )
            for text in expressions
        )
        yield with_it, without


WAYS: dict[str, Callable[[Any], Any]] = {
    "lazy": lambda step: step,
    "compile": xs.compile,
    "compile with repeat": lambda step: xs.compile(step, repeat="auto"),
    "torch.compile": lambda step: torch.compile(step, backend="isoshard"),
}
OF_SCOPE = {
    "module": ("lazy", "compile with repeat"),
    "function": ("lazy", "compile", "torch.compile"),
    "method": ("lazy", "compile"),
}
"""Ways to run a program, by the scope of its step."""


class Holder:
    """An object of a user."""


def arguments(device: str) -> list[torch.Tensor]:
    """What the calls get: other values in each."""
    return [
        torch.linspace(-1, 1, SIZE, device=device) * number + number
        for number in range(1, CALLS + 1)
    ]


def numbers(value: Any) -> list[np.ndarray]:
    """The values of a result, a copy of each."""
    values = value if isinstance(value, tuple) else (value,)
    return [one.detach().cpu().numpy().copy() for one in values if isinstance(one, torch.Tensor)]


def ran(program: Program, device: str, way: str, known: dict[str, Any]) -> list[list[np.ndarray]]:
    """The results of each call, and the state after it.

    Args:
        program: to run.
        device: of the tensors.
        way: to run it.
        known: names that its source may use, besides the packages'.
    """
    scope: dict[str, Any] = {
        "torch": torch, "np": np, "iso": iso, "xs": xs, "P": P, "Holder": Holder,
        "Buffers": torch.nn.Module, "START": lambda: torch.zeros(SIZE, device=device), **known,
    }  # fmt: skip
    exec(compile(program.source(), f"<{program.title}>", "exec"), scope)
    step, seen = scope["make"](WAYS[way])
    found = []
    for value in arguments(device):
        found.append(numbers(step(value)) + numbers(seen()))
    return found
