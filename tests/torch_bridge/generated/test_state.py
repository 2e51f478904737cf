"""Drawn programs that keep state in all the places that Python has, and read it between calls."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import isoshard.torch_bridge as xs

EXAMPLES = int(os.environ.get("EXAMPLES", "25"))
"""With `EXAMPLES=5000` pytest tries more, each time others."""
SIZE = 4
PLACES = {
    "attribute": "box_17.hidden_17",
    "item": "table_23['key_23']",
    "element": "row_31[1]",
    "global": "glob_41",
    "nonlocal": "cell_47",
    "buffer": "layer_53.kept_53",
    "class": "Kind_59.shared_59",
}
PAIR, LATE = "box_17.pair_61", "box_17.late_67"
SOURCE = """
glob_41 = START(4)
class Kind_59:
    shared_59 = START(7)
class Layer_53(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept_53", START(6))
box_17, table_23, row_31 = Holder(), {{"key_23": START(2)}}, [START(0), START(3)]
box_17.hidden_17, box_17.pair_61, box_17.late_67 = START(1), (START(8), START(9)), None
layer_53 = Layer_53()
def make(wrap):
    cell_47 = START(5)
    def step_71(value_73):
        global glob_41
        nonlocal cell_47
{body}
    def change(number):
        global glob_41
        nonlocal cell_47
{changes}
    def seen():
        return [{seen}]
    return wrap(step_71), change, seen
"""
UNARY = ("{}.tanh()", "({} * 0.5)", "{}.detach()", "{}.clone()", "{}[:]", "{}.view(-1)")


class Holder:
    """An object of a user."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A step and what happens between its calls.

    Attributes:
        lines: of the step.
        events: what happens after each call: the lines that change something, and whether all
            state is read.
    """

    lines: tuple[str, ...]
    events: tuple[tuple[str, bool], ...]

    def source(self) -> str:
        """The text; `make(wrap)` of it gives the step, what changes state, and what reads it."""
        changes = [
            f"if number == {number}:\n    {line or 'pass'}"
            for number, (line, _) in enumerate(self.events)
        ]
        return SOURCE.format(
            body=textwrap.indent("\n".join(self.lines), " " * 8),
            changes=textwrap.indent("\n".join(changes), " " * 8),
            seen=", ".join([*PLACES.values(), f"*{PAIR}"]),
        )


values = st.recursive(
    st.sampled_from([*PLACES.values(), f"{PAIR}[0]", f"{PAIR}[1]", "value_73", "value_73"]),
    lambda inner: st.one_of(
        st.builds(lambda a, b: f"({a} + {b})", inner, inner),
        st.builds(lambda a, form: form.format(a), inner, st.sampled_from(UNARY)),
    ),
    max_leaves=3,
)
places = st.sampled_from([*PLACES.values()])
statements = st.one_of(
    st.builds("{} = {}".format, places, values),
    st.builds("{} = {} * 0.5 + value_73".format, places, places),
    st.builds("{}.add_(({}).tanh())".format, places, values),
    st.builds("{} += value_73.tanh()".format, places),
    st.builds("{} = {}".format, places, places),
    st.builds(f"{PAIR} = (({{}}).tanh(), {{}})".format, values, values),
    st.builds(
        f"if {LATE} is None:\n    {LATE} = {{}}\n{{}} = {LATE} + value_73".format, values, places
    ),
    st.just("box_17.count_79 = getattr(box_17, 'count_79', 0) + 1"),
)
events = st.tuples(
    st.one_of(
        st.just(""),
        st.just(""),
        st.builds("{} = START({})".format, places, st.integers(0, 9)),
        st.builds("{} = {}".format, places, places),
        st.builds("{}.mul_(0.5)".format, places),
        st.just(f"{LATE} = None"),
    ),
    st.booleans(),
)
programs = st.builds(
    lambda lines, result, happens: Program((*lines, f"return {result}"), tuple(happens)),
    st.lists(statements, min_size=1, max_size=4),
    values,
    st.lists(events, min_size=4, max_size=5),
)


def results(program: Program, device: str, wrap: Any) -> list[np.ndarray]:
    """What each call returns, and the state where it is read, and in the end."""
    scope: dict[str, Any] = {
        "torch": torch,
        "Holder": type("Holder", (), {}),
        "START": lambda number: torch.linspace(-1, 1, SIZE, device=device) * number + 0.1,
        "__name__": "program",
    }
    exec(compile(program.source(), "<program>", "exec"), scope)
    step, change, seen = scope["make"](wrap)
    found: list[torch.Tensor] = []
    for number, (_, reads) in enumerate(program.events):
        value = torch.linspace(0, 1, SIZE, device=device) * (number + 1)
        found.append(step(value).detach().cpu().clone())
        change(number)
        if reads:
            found += [one.detach().cpu().clone() for one in seen()]
    found += [one.detach().cpu().clone() for one in seen()]
    return [one.numpy() for one in found]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 25,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
@given(programs, st.sampled_from(["auto", None]))
def test_state_is_as_without_compile(program, repeat):
    note(program.source())
    wanted = results(program, "cpu", lambda step: step)
    found = results(program, "jax", lambda step: xs.compile(step, repeat=repeat))
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=f"value {number}")
